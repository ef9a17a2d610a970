"""Networks of other packages with random weights, and their logits by ours.

    python -m others.agreement      measures, and writes the tables of docs/weights.md

Every network is saved as its package saves it and read as `Config.init_from` is, with
the config.json next to it; or exported as `jaxscale export` does and read by the
package. Nothing is downloaded.
"""

import contextlib
import functools
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import config as cfg
from jaxscale.data import DatasetInfo, TextInfo
from jaxscale.experiment.model import init_fn, make_model
from jaxscale.models.config_json import write_config_json
from jaxscale.models.hf_config import llama_config, vit_config
from jaxscale.models.stack import Stack, stack_logits
from jaxscale.models.timm_config import timm_config
from jaxscale.weights import export_safetensors, import_safetensors
from jaxscale.weights.check import check_source
from others import training
from others.packages import timm, torch, torchvision, transformers
from support.configs import small_config
from support.paths import ROOT

PAGE = ROOT / "docs/weights.md"
BEGIN, END = "<!-- agreement: begin -->", "<!-- agreement: end -->"
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
CLASSES, WORDS = 7, 48


def photos(pixels, channels=3):
  """Return the information on images of a size that a model needs."""
  mean, std = MEAN[:channels], STD[:channels]
  return DatasetInfo("photos", (pixels, pixels, channels), CLASSES, mean, std)


TEXT = TextInfo("words", WORDS, 64)


def stir(model, seed=0):
  """No value as it starts; signals keep their size through the layers."""
  draw = torch.Generator().manual_seed(seed)
  for name, x in model.state_dict().items():
    if not x.dtype.is_floating_point:
      continue
    if name.endswith("running_var"):
      x.uniform_(0.5, 2.0, generator=draw)
    elif x.ndim < 2:
      x.normal_(1.0 if "weight" in name else 0.0, 0.3, generator=draw)
    else:
      x.normal_(0.0, x[0].numel() ** -0.5, generator=draw)
  return model.eval()


def batch_of(info):
  """Three images, uint8 NHWC, or three rows of tokens."""
  rng = np.random.default_rng(0)
  if isinstance(info, TextInfo):
    return rng.integers(0, info.vocab_size, (3, info.sequence_length)).astype(np.int32)
  return rng.integers(0, 256, (3, *info.image_shape)).astype(np.uint8)


def theirs(model, info):
  """Logits of their model, float32."""
  x = batch_of(info)
  with torch.no_grad():
    if isinstance(info, TextInfo):
      return model(torch.from_numpy(x).long()).logits.numpy()
    seen = (x - np.array(info.mean, np.float32)) / np.array(info.std, np.float32)
    found = model(torch.from_numpy(seen.astype(np.float32).transpose(0, 3, 1, 2)))
    return getattr(found, "logits", found).numpy()


def built(settings, info):
  """Return (our model, its shapes) for settings."""
  model = make_model(small_config(model=settings), info, train=False)
  made = jax.eval_shape(init_fn(model), jax.random.key(0))
  return model, made if isinstance(made, tuple) else (made, {})


def logits_of(model, params, state, info):
  """Return the logits of our model."""
  x = jnp.asarray(batch_of(info))
  if isinstance(model, Stack):
    batch = {"tokens" if isinstance(info, TextInfo) else "image": x}
    return np.asarray(jax.jit(functools.partial(stack_logits, model))(params, batch))
  apply = jax.jit(lambda params, state: model.apply(params, state, x, False, None)[0])
  return np.asarray(apply(params, state))


def read(folder, settings, info, **options):
  """Return our model's logits with the parameters of a folder, and notes about them."""
  model, abstract = built(settings, info)
  notes = []

  def check(naming, names):
    notes.extend(check_source(folder, naming, names, settings, info, **options))

  classes = getattr(info, "num_classes", None) or info.vocab_size
  found = import_safetensors(folder, *abstract, num_classes=classes, check=check, **options)
  notes.append(found.summary)
  return logits_of(model, found.params, found.model_state, info), notes


@contextlib.contextmanager
def saved(model):
  """Yield a folder with their model, as its package saves it."""
  with tempfile.TemporaryDirectory() as name:
    if isinstance(model, transformers.PreTrainedModel):
      model.save_pretrained(name)
    elif hasattr(model, "pretrained_cfg"):
      timm.models.save_for_hf(model, name, safe_serialization="both")
      Path(name, "pytorch_model.bin").unlink()
    else:
      from safetensors.torch import save_file

      save_file(model.state_dict(), Path(name, "model.safetensors"))
    yield Path(name)


def of_timm(architecture, settings, pixels, channels=3, **options):
  """Return the outputs of timm's network by our model and by timm."""
  model = timm.create_model(architecture, num_classes=CLASSES, in_chans=channels, **options)
  info = photos(pixels, channels)
  with saved(stir(model)) as folder:
    return read(folder, settings, info)[0], theirs(model, info)


# A small ViT, to timm and to us.
VIT, SMALL = "vit_base_patch16_224", dict(embed_dim=48, depth=2, num_heads=3, patch_size=8)
SMALL |= dict(img_size=32)


def vit48(**options):
  return cfg.ViT(width=48, num_layers=2, num_heads=3, patch=8, **options)


def vit_of_timm(settings=None, **options):
  """Return the outputs of a small ViT of timm's with sizes of its own."""
  return of_timm(VIT, settings or vit48(), 32, **SMALL | options)


def loaded(architecture, settings, info, options=None, **changes):
  """Return the outputs of a timm network for other images, by our model and by timm."""
  first = timm.create_model(architecture, num_classes=CLASSES, **(options or {}))
  with saved(stir(first)) as folder:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **changes).eval()
    return read(folder, settings, info)[0], theirs(model, info)


def of_torchvision(model, settings, pixels):
  """Return the outputs of torchvision's network by our model and by torchvision."""
  with saved(stir(model)) as folder:
    return read(folder, settings, photos(pixels))[0], theirs(model, photos(pixels))


def vit_of_torchvision():
  """Return the outputs of torchvision's ViT by our model and by torchvision."""
  sizes = dict(num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, image_size=32, patch_size=8)
  model = torchvision.models.VisionTransformer(num_classes=CLASSES, **sizes)
  return of_torchvision(model, vit48(hidden=96), 32)


def vit_of_transformers():
  """Hugging Face's ViT."""
  sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96)
  config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=CLASSES, **sizes)
  model = stir(transformers.ViTForImageClassification(config))
  with saved(model) as folder:
    ours = read(folder, vit48(hidden=96, norm_eps=1e-12), photos(32))[0]
    return ours, theirs(model, photos(32))


SIZES = {"num_layers": 2, "width": 48, "num_heads": 4, "num_kv_heads": 2, "hidden": 64}
SCALED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALED |= dict(original_max_position_embeddings=32)
SCALED_HERE = {"rope_factor": 8.0, "rope_length": 32}
QK_NORM = {"qk_norm": True, "head_width": 12}


def language_model(kind, **fields):
  """Return a model of transformers with random weights."""
  sizes = dict(vocab_size=WORDS, hidden_size=48, intermediate_size=64, num_hidden_layers=2)
  sizes |= dict(num_attention_heads=4, num_key_value_heads=2)
  sizes |= dict(rms_norm_eps=1e-5, tie_word_embeddings=False)
  config = getattr(transformers, f"{kind}Config")(**sizes | fields)
  config._attn_implementation = "eager"
  return stir(getattr(transformers, f"{kind}ForCausalLM")(config))


def of_transformers(kind, settings=None, **fields):
  """Return the outputs of a transformers model by our model and by transformers."""
  model = language_model(kind, **fields)
  with saved(model) as folder:
    ours = read(folder, cfg.Transformer(**SIZES | (settings or {})), TEXT)[0]
  return ours, theirs(model, TEXT)


def random_params(settings, info):
  """Return (our model, params, state) with values that make every part count."""
  model, abstract = built(settings, info)
  leaves, tree = jax.tree.flatten(abstract)
  rng = np.random.default_rng(0)

  def one(x):
    inputs = np.prod(x.shape[:-1]) if len(x.shape) == 4 else x.shape[-2:][0]
    deviation = inputs**-0.5 if len(x.shape) > 1 else 0.3
    value = rng.normal(0.0 if len(x.shape) > 1 else 1.0, deviation, x.shape)
    # Variances of BatchNorm are positive.
    return jnp.asarray(value if len(x.shape) > 1 else np.abs(value), x.dtype)

  return model, *tree.unflatten([one(x) for x in leaves])


def to_transformers(**options):
  """Ours by transformers, from what `jaxscale export` writes."""
  settings = cfg.Transformer(**SIZES | options)
  model, params, _ = random_params(settings, TEXT)
  with tempfile.TemporaryDirectory() as name:
    path = Path(name, "model.safetensors")
    export_safetensors(path, params, naming="huggingface", num_classes=WORDS)
    sizes = dict(hidden=64, vocab_size=WORDS, sequence_length=64, dtype="float32")
    write_config_json(path, llama_config(settings, **sizes))
    other = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
  return logits_of(model, params, {}, TEXT), theirs(other, TEXT)


def vit_to_transformers(settings, pixels):
  """Our ViT by transformers, likewise."""
  info = photos(pixels)
  model, params, _ = random_params(settings, info)
  with tempfile.TemporaryDirectory() as name:
    path = Path(name, "model.safetensors")
    export_safetensors(path, params, naming="huggingface", num_classes=CLASSES)
    fields = {"hidden": settings.hidden, "dtype": "float32"}
    write_config_json(path, vit_config(settings, info._asdict(), **fields))
    again, notes = read(name, settings, info)
    assert len(notes) == 1, notes
    other = transformers.AutoModelForImageClassification.from_pretrained(name).eval()
  ours = logits_of(model, params, {}, info)
  np.testing.assert_array_equal(ours, again)
  return ours, theirs(other, info)


def to_timm(settings, pixels, channels=3):
  """Ours by `timm.create_model`, from what `jaxscale export` writes."""
  info = photos(pixels, channels)
  model, params, state = random_params(settings, info)
  with tempfile.TemporaryDirectory() as name:
    path = Path(name, "model.safetensors")
    export_safetensors(path, params, state, naming="timm", num_classes=CLASSES)
    write_config_json(path, timm_config(settings, info._asdict()))
    # What is written is read again, and is what timm makes of it.
    again, notes = read(name, settings, info)
    assert len(notes) == 1, notes
    other = timm.create_model(f"local-dir:{name}", pretrained=True).eval()
  seen = timm.data.resolve_data_config({}, model=other)
  np.testing.assert_allclose(np.array(seen["mean"]) * 255, info.mean, rtol=1e-6)
  assert seen["input_size"] == (channels, pixels, pixels)
  ours = logits_of(model, params, state, info)
  np.testing.assert_array_equal(ours, again)
  return ours, theirs(other, info)


RESNET18, TINY = cfg.ResNet(depth=18), cfg.ViT(width=192, num_heads=3)
MEAN_OF_PATCHES = dict(class_token=False, global_pool="avg", fc_norm=False)
SMALL_VIT = {"width": 48, "num_layers": 2, "num_heads": 4, "patch": 8, "hidden": 100}
BASE = {"depths": (3, 3, 27, 3), "dims": (128, 256, 512, 1024)}
SMALL_CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64)}
TINY_CONVNEXT = cfg.ConvNeXt(**SMALL_CONVNEXT)
NETWORKS = {
  "timm resnet18": lambda: of_timm("resnet18", RESNET18, 64),
  "timm resnet50": lambda: of_timm("resnet50", cfg.ResNet(depth=50), 64),
  "timm resnet18, read into one channel": lambda: loaded(
    "resnet18", RESNET18, photos(64, 1), in_chans=1
  ),
  "timm vit_tiny_patch16_224": lambda: of_timm("vit_tiny_patch16_224", TINY, 224),
  "timm ViT, small": vit_of_timm,
  "timm ViT, mean of patches": lambda: vit_of_timm(vit48(pool="mean"), **MEAN_OF_PATCHES),
  "timm ViT, read at 48 instead of 32 pixels": lambda: loaded(
    VIT, vit48(), photos(48), SMALL, img_size=48
  ),
  "timm ViT, read into one channel": lambda: loaded(VIT, vit48(), photos(32, 1), SMALL, in_chans=1),
  "timm convnext_tiny": lambda: of_timm("convnext_tiny", cfg.ConvNeXt(), 64),
  "timm convnext_base": lambda: of_timm("convnext_base", cfg.ConvNeXt(**BASE), 64),
  "timm convnext_tiny, read into one channel": lambda: loaded(
    "convnext_tiny", TINY_CONVNEXT, photos(64, 1), SMALL_CONVNEXT, in_chans=1
  ),
  "torchvision resnet18": lambda: of_torchvision(
    torchvision.models.resnet18(num_classes=CLASSES), RESNET18, 64
  ),
  "torchvision VisionTransformer": vit_of_torchvision,
  "transformers ViTForImageClassification": vit_of_transformers,
  "transformers Llama": lambda: of_transformers("Llama"),
  "transformers Llama, tied": lambda: of_transformers("Llama", tie_word_embeddings=True),
  "transformers Llama 3.1's positions": lambda: of_transformers(
    "Llama", SCALED_HERE, rope_scaling=SCALED
  ),
  "transformers Mistral": lambda: of_transformers("Mistral", sliding_window=None),
  "transformers Qwen2": lambda: of_transformers("Qwen2", {"qkv_bias": True}),
  "transformers Qwen3": lambda: of_transformers("Qwen3", QK_NORM, head_dim=12),
  "ours as timm's resnet18": lambda: to_timm(RESNET18, 64, channels=1),
  "ours as timm's ViT": lambda: to_timm(cfg.ViT(**SMALL_VIT), 32),
  "ours as timm's ViT, mean of patches": lambda: to_timm(cfg.ViT(**SMALL_VIT, pool="mean"), 32),
  "ours as timm's ConvNeXt": lambda: to_timm(TINY_CONVNEXT, 64, channels=1),
  "ours as Llama": to_transformers,
  "ours as Llama with scaled positions": lambda: to_transformers(**SCALED_HERE, rope_theta=5e5),
  "ours as Qwen2": lambda: to_transformers(qkv_bias=True),
  "ours as Hugging Face's ViT": lambda: vit_to_transformers(cfg.ViT(**SMALL_VIT), 32),
  "ours as Qwen3": lambda: to_transformers(qk_norm=True, head_width=16),
}


@functools.cache
def measured(name):
  """(largest difference of a logit, standard deviation of theirs)."""
  ours, there = NETWORKS[name]()
  assert ours.shape == there.shape, (ours.shape, there.shape)
  return float(np.abs(ours - there).max()), float(there.std())


def versions():
  """Return the versions of the packages, in one line."""
  packages = torch, torchvision, timm, transformers
  return ", ".join(f"{p.__name__} {p.__version__.partition('+')[0]}" for p in packages)


def table():
  """Measure, and return the tables of docs/weights.md."""
  found = {name: measured(name) for name in NETWORKS}
  rows = [f"| {name} | {e:.1e} | {s:.2f} |" for name, (e, s) in found.items()]
  head = "| network, random weights | largest difference | deviation of logits |"
  lines = [BEGIN, f"With {versions()}, float32, on a CPU:", "", head, "|---|---|---|"]
  trained = [f"| {name} | {e:.1e} |" for name, e in training.differences().items()]
  head = ["", "| training | largest difference |", "|---|---|"]
  return "\n".join([*lines, *rows, *head, *trained, END])


def written():
  """Return the current tables in docs/weights.md."""
  text = PAGE.read_text()
  return text[text.index(BEGIN) : text.index(END) + len(END)]


def main():
  """Measure all, and write the table."""
  warnings.simplefilter("ignore")
  new = table()
  PAGE.write_text(PAGE.read_text().replace(written(), new))
  print(new)


if __name__ == "__main__":
  sys.exit(main())
