"""`jaxscale generate` of a folder of transformers, and what transformers writes."""

import pytest

for package in ("torch", "transformers", "tokenizers"):
  pytest.importorskip(package)

import tokenizers
import torch
import transformers

from jaxscale import cli
from jaxscale.data.tokenizer import read_prompt_tokenizer
from others import agreement

TEXT = "the apple and the tree and an apple"


def make_tokenizer(folder, first):
  """Subwords of a short text, with special tokens as Llama 3's or Qwen's."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=agreement.WORDS, special_tokens=["<bos>", "<eos>"], show_progress=False
  )
  model.train_from_iterator([TEXT] * 5, trainer)
  if first == "template":
    template = {"single": "<bos> $A", "special_tokens": [("<bos>", 0)]}
    model.post_processor = tokenizers.processors.TemplateProcessing(**template)
  made = transformers.PreTrainedTokenizerFast(
    tokenizer_object=model, bos_token="<bos>", eos_token="<eos>"
  )
  made.save_pretrained(folder)
  return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
  """A language model of random weights, which prefers some words."""
  model = agreement.language_model(
    "Llama", rope_scaling=agreement.SCALED, bos_token_id=0, eos_token_id=1,
    max_position_embeddings=256,
  )  # fmt: skip
  model.save_pretrained(tmp_path)
  return model, tmp_path


@pytest.mark.parametrize("first", ["template", "none"])
@pytest.mark.parametrize("prompt", ["the tree", " and", "apple thean "])
def test_greedy_text_is_that_of_transformers(folder, first, prompt, capsys):
  model, path = folder
  tokenizer = make_tokenizer(path, first)
  given = tokenizer(prompt, return_tensors="pt").input_ids
  assert read_prompt_tokenizer(path).encode(prompt) == given[0].tolist()
  assert (given[0, 0] == 0) == (first == "template")
  with torch.no_grad():
    made = model.generate(given, max_new_tokens=24, do_sample=False, pad_token_id=1)
  wanted = tokenizer.decode(made[0], skip_special_tokens=True)
  argv = [f"--workdir={path}", f"--prompt={prompt}", "--tokens=24", "--temperature=0"]
  assert cli.main(["generate", *argv]) == 0
  assert capsys.readouterr().out == wanted + "\n"


def test_an_empty_prompt_begins_with_the_first_token(folder, capsys):
  model, path = folder
  tokenizer = make_tokenizer(path, "none")
  made = model.generate(
    torch.tensor([[0]]), max_new_tokens=24, do_sample=False, pad_token_id=1
  )
  assert (
    cli.main(["generate", f"--workdir={path}", "--tokens=24", "--temperature=0"]) == 0
  )
  wanted = tokenizer.decode(made[0], skip_special_tokens=True)
  assert capsys.readouterr().out == wanted + "\n"


@pytest.mark.parametrize(("add", "first"), [(True, 0), (False, None), (None, 0)])
def test_the_folder_may_say_whether_texts_have_a_first_token(tmp_path, add, first):
  import json

  make_tokenizer(tmp_path, "none" if add else "template")
  where = tmp_path / "tokenizer_config.json"
  settings = json.loads(where.read_text())
  settings.pop("add_bos_token", None)
  settings |= {} if add is None else {"add_bos_token": add}
  where.write_text(json.dumps(settings))
  tokens = read_prompt_tokenizer(tmp_path).encode("the")
  assert (tokens[0] == 0) == (first == 0)
