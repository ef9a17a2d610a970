"""Fine-tuned models in transformers and timm: the exported folder is all that they need."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
for package in ("timm", "tokenizers", "transformers"):
  pytest.importorskip(package)

import timm
import tokenizers
import torch
import transformers
from PIL import Image

from jaxscale import cli, data, load, models
from jaxscale import config as cfg
from jaxscale.run.fit import fit

SMALL = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=256)
LINE = "the cat sat on the mat"


def pretrained(folder, kind, tied):
  """Write a model of transformers with random weights, more tokens than its tokenizer has."""
  byte_level = tokenizers.pre_tokenizers.ByteLevel
  words = tokenizers.Tokenizer(tokenizers.models.BPE())
  words.pre_tokenizer = byte_level(add_prefix_space=False)
  words.decoder = tokenizers.decoders.ByteLevel()
  options = dict(
    special_tokens=["<|endoftext|>", "<|end|>"], initial_alphabet=byte_level.alphabet()
  )
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, **options)
  words.train_from_iterator([LINE], trainer)
  fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
  fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
  fast.save_pretrained(folder)
  sizes = SMALL | dict(vocab_size=320, tie_word_embeddings=tied, eos_token_id=0)
  sizes |= dict(head_dim=16) if kind == "Qwen3" else {}
  torch.manual_seed(0)
  config = getattr(transformers, f"{kind}Config")(**sizes)
  model = getattr(transformers, f"{kind}ForCausalLM")(config)
  model.generation_config = transformers.GenerationConfig(eos_token_id=[0, 1], pad_token_id=0)
  model.save_pretrained(folder)


@pytest.mark.parametrize("kind, tied", [("Qwen3", True), ("Llama", False), ("Mistral", False)])
def test_a_fine_tuned_language_model_is_a_drop_in(kind, tied, tmp_path, capsys):
  source, workdir, to = (tmp_path / name for name in ("source", "run", "new"))
  pretrained(source, kind, tied)
  for split in ("train", "val"):
    (tmp_path / "text" / split).mkdir(parents=True)
    for i in range(64):
      (tmp_path / "text" / split / f"{i}.txt").write_text(LINE)
  text = {"path": str(tmp_path / "text"), "cache_dir": str(tmp_path / "cache")}
  config = cfg.Config(
    model=models.from_folder(source),
    data=cfg.TextFiles(tokenizer=str(source), sequence_length=16, **text),
    optimizer=cfg.AdamW(lr=1e-2),
    init_from=str(source),
    batch_size=16,
    steps=60,
    log=cfg.Log(tensorboard=False, plot=False),
  )
  fit(config, workdir)
  assert cli.main(["export", str(workdir), "--to", str(to), "--naming", "huggingface"]) == 0
  capsys.readouterr()
  model = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
  words = transformers.AutoTokenizer.from_pretrained(to)
  assert type(model).__name__ == f"{kind}ForCausalLM" and words.chat_template
  ids = words("the cat sat", return_tensors="pt").input_ids
  with torch.no_grad():
    there = model(ids).logits.numpy()
  ours = load(workdir).predict(ids.numpy().astype(np.int32)).outputs
  np.testing.assert_allclose(there[..., : ours.shape[-1]], ours, rtol=1e-4, atol=1e-4)
  out = model.generate(ids, do_sample=False, max_new_tokens=100)[0]
  assert words.decode(out) == f"{LINE}<|endoftext|>"
  before, after = (json.loads((x / "config.json").read_text()) for x in (source, to))
  same = {k: v for k, v in before.items() if k not in ("dtype", "transformers_version")}
  assert same == {k: after[k] for k in same}
  sizes = [(x / "model.safetensors").stat().st_size for x in (source, to)]
  assert abs(sizes[1] - sizes[0]) < 2000  # metadata


def photos(folder):
  rng = np.random.default_rng(0)
  for split in ("train", "val"):
    for channel, name in enumerate(("ant", "bee", "cat")):
      (folder / split / name).mkdir(parents=True)
      for i in range(8):
        pixels = rng.integers(0, 130, (80, 100, 3))
        pixels[..., channel] += 120
        image = Image.fromarray(pixels.astype(np.uint8))
        image.resize((200, 160)).save(folder / split / name / f"{i}.png")


SIZES = {
  "vit_base_patch16_224": dict(embed_dim=48, depth=2, num_heads=3, patch_size=8, img_size=64),
  "convnext_tiny": dict(depths=(1, 1, 2, 1), dims=(16, 24, 32, 40)),
  "resnet18": {},
}


@pytest.mark.parametrize("architecture", [*SIZES, "transformers"])
def test_a_fine_tuned_image_model_is_a_drop_in(architecture, tmp_path, capsys):
  source, workdir, to = (tmp_path / name for name in ("source", "run", "new"))
  photos(tmp_path / "photos")
  if architecture == "transformers":
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, patch_size=8)
    config = transformers.ViTConfig(image_size=64, intermediate_size=96, num_labels=9, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(source)
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(source)
  else:
    options = SIZES[architecture]
    model = timm.create_model(architecture, num_classes=9, **options)
    timm.models.save_for_hf(model, source, safe_serialization=True, model_args=options)
  settings = data.preprocessing_of(source) | {"image_size": 64, "augment": "flip"}
  config = cfg.Config(
    model=models.from_folder(source),
    data=cfg.ImageFolder(path=str(tmp_path / "photos"), **settings),
    optimizer=cfg.AdamW(lr=1e-3),
    init_from=str(source),
    init_head=True,
    batch_size=8,
    epochs=1,
    log=cfg.Log(tensorboard=False, plot=False),
  )
  fit(config, workdir)
  naming = "huggingface" if architecture == "transformers" else "timm"
  assert cli.main(["export", str(workdir), "--to", str(to), "--naming", naming]) == 0
  capsys.readouterr()
  validation = config.data.build()[1]
  images = validation.load(np.arange(24), None)["image"]
  ours = load(workdir).predict(images).outputs
  files = sorted((tmp_path / "photos" / "val").glob("*/*.png"))
  pixels = [Image.open(file) for file in files]
  if naming == "timm":
    model = timm.create_model(f"local-dir:{to}", pretrained=True).eval()
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    inputs = torch.stack([prepare(image) for image in pixels])
    assert model.pretrained_cfg["label_names"] == ["ant", "bee", "cat"]
    with torch.no_grad():
      there = model(inputs).numpy()
  else:
    model = transformers.AutoModelForImageClassification.from_pretrained(to).eval()
    prepare = transformers.AutoImageProcessor.from_pretrained(to)
    assert model.config.id2label == {0: "ant", 1: "bee", 2: "cat"}
    with torch.no_grad():
      there = model(**prepare(pixels, return_tensors="pt")).logits.numpy()
  # transformers resizes by PyTorch, which rounds some pixels otherwise than Pillow.
  np.testing.assert_allclose(there, ours, atol=1e-3 if naming == "huggingface" else 1e-5)


def test_all_families_of_timm_are_read_as_timm_makes_them(tmp_path):
  """Sizes of the settings against the arrays of timm's networks."""
  for name in timm.list_models(["vit_*", "deit_*", "resnet*", "convnext*"]):
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    try:
      settings = models.from_folder(tmp_path)
    except cfg.ConfigError:
      continue
    with torch.device("meta"):
      network = timm.create_model(name)
    if isinstance(settings, cfg.ViT):
      block = network.blocks[0]
      there = network.embed_dim, len(network.blocks), block.attn.num_heads
      there += (block.mlp.fc1.out_features, network.patch_embed.patch_size[0])
      ours = settings.width, settings.num_layers, settings.num_heads
      assert there == (*ours, settings.hidden, settings.patch), name
    elif isinstance(settings, cfg.ConvNeXt):
      stages = [(len(s.blocks), s.blocks[0].conv_dw.out_channels) for s in network.stages]
      assert [*zip(settings.depths, settings.dims, strict=True)] == stages, name
    else:
      assert name.endswith(f"resnet{settings.depth}")
