"""Sampling: a cache against the whole model, choices against numpy, the command."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import cli
from jaxscale import config as cfg
from jaxscale.checkpoint import load_params
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.config.record import FORMAT, from_plain, to_plain
from jaxscale.data import TextInfo
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import ConfigError
from jaxscale.experiment.model import make_model
from jaxscale.models import make_transformer
from jaxscale.models.cached import advance, empty_cache
from jaxscale.models.stack import stack_logits
from jaxscale.run import generate
from jaxscale.run.generate import choose, sample
from jaxscale.training.types import TrainState
from support.cases import all_slow_except
from support.configs import small_config
from support.tables import table

SIZES = dict(num_layers=2, width=16, num_heads=4, num_kv_heads=2, hidden=24)
MODEL = cfg.Transformer(**SIZES, pad_vocab_to=1)
STACK = make_transformer(vocab_size=256, **SIZES, pad_vocab_to=1)


@functools.cache
def params(seed=0):
  """Parameters that tell tokens apart."""
  made = STACK.init(jax.random.key(seed))
  return jax.tree.map(lambda x: 10 * x if x.ndim > 1 else x, made)


def tokens_of(rows, length, seed=0):
  return np.random.default_rng(seed).integers(0, 256, (rows, length)).astype(np.int32)


@pytest.mark.parametrize("dtype", all_slow_except(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("parts", [(7, 1, 1, 3), (1,) * 12, (12,)], ids=str)
def test_a_cache_gives_the_whole_models_logits(parts, dtype):
  stack = make_transformer(vocab_size=256, **SIZES, qk_norm=True, dtype=dtype)
  params = jax.tree.map(lambda x: x * 5, stack.init(jax.random.key(0)))
  tokens = tokens_of(2, 12)
  expected = jax.jit(functools.partial(stack_logits, stack))(params, {"tokens": tokens})
  step = jax.jit(functools.partial(advance, stack))
  cache, found = empty_cache(stack, params, 2, 15), []
  assert cache.k.shape == (2, 2, 15, 2, 4) and cache.k.dtype == jnp.dtype(dtype)
  for part in np.split(tokens, np.cumsum(parts)[:-1], axis=1):
    h, cache = step(params, part, cache)
    found.append(stack.logits(params["head"], h))
  assert int(cache.length) == 12 and not np.any(cache.k[:, :, 12:])
  bound = 1e-5 if dtype == "float32" else 4e-2
  error = np.abs(np.concatenate(found, 1) - expected).max()
  assert error < bound * np.abs(expected).max()


def test_greedy_is_the_likeliest_of_the_whole_model():
  tokens = tokens_of(3, 4)
  function = functools.partial(sample, STACK, num_tokens=6, temperature=0)
  found = jax.jit(function)(params(), tokens, jax.random.key(0))
  logits = jax.jit(functools.partial(stack_logits, STACK))
  room = np.pad(tokens, ((0, 0), (0, 6)))  # causal: what is behind does not count
  for i in range(4, 10):
    room[:, i] = np.argmax(logits(params(), {"tokens": room})[:, i - 1], axis=-1)
  np.testing.assert_array_equal(found, room[:, 4:])
  assert found.dtype == jnp.int32


def test_the_seed_makes_the_text():
  function = jax.jit(functools.partial(sample, STACK, num_tokens=8, temperature=5.0))
  one, again, other = (
    np.asarray(function(params(), tokens_of(1, 3), jax.random.key(seed))) for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(one, again)
  assert (one != other).any() and len(set(one[0].tolist())) > 3


def np_kept(logits, temperature, top_k, top_p):
  """Probabilities that are left, one token at a time from the likeliest on."""
  p = np.exp(np.asarray(logits, np.float64) / temperature)
  order = sorted(range(len(p)), key=lambda i: (-p[i], i))[:top_k]
  total, mass, kept = sum(p[i] for i in order), 0.0, np.zeros(len(p))
  for i in order:
    kept[i] = p[i]
    mass += p[i] / total
    if top_p is not None and mass >= top_p:
      break
  return kept / kept.sum()


CHOICES = [(1.0, None, None), (0.5, None, None), (1.0, 3, None), (2.0, None, 0.6), (1.0, 5, 0.7)]
CHOICES += [(1.0, None, 0.01), (1.0, 1, 1.0)]
CHOICES += [(1.0, 4, None)]  # the fourth is one of three equals


@pytest.mark.parametrize("temperature, top_k, top_p", CHOICES)
def test_choices_have_the_probabilities_they_should(temperature, top_k, top_p):
  logits = np.array([0.1, 2.0, -1.0, 1.0, 0.1, 1.5, -3.0, 0.1], np.float32)
  many = 20_000
  function = jax.jit(functools.partial(choose, temperature=temperature, top_k=top_k, top_p=top_p))
  found = function(np.tile(logits, (many, 1)), jax.random.key(0))
  frequency = np.bincount(found, minlength=8) / many
  expected = np_kept(logits, temperature, top_k, top_p)
  assert not np.any(frequency[expected == 0])
  deviation = np.sqrt(expected * (1 - expected) / many)
  assert np.all(np.abs(frequency - expected) <= 4 * deviation)


def test_temperature_0_takes_the_first_of_equals():
  logits = jnp.array([[0.0, 3.0, 3.0], [1.0, 0.0, 0.5]])
  assert choose(logits, jax.random.key(0), temperature=0).tolist() == [1, 0]


def state(step, params, average=()):
  """Return a state as in a checkpoint: with an optimizer's state."""
  opt_state = {"mu": jax.tree.map(jnp.ones_like, params)}, jnp.int32(step)
  return TrainState(jnp.int32(step), params, {}, opt_state, exchange_state=(), average=average)


def described(info, source=None):
  config = small_config(model=MODEL, data=source or cfg.Digits())
  data = info._asdict() | {"arrays": {**info.arrays}}
  return {"format": FORMAT, "config": to_plain(config), "data": data}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Return the workdir of a run with two checkpoints."""
  workdir = tmp_path_factory.mktemp("run")
  text = described(TextInfo("words", 256, 64, 1.0))
  (workdir / "config.json").write_text(json.dumps(text))
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    checkpoints.save(state(3, params(1)))
    checkpoints.save(state(5, params(0)))
  return workdir


def text_of(params, prompt, num_tokens, **options):
  """Return the text from `sample`, up to the end of the document."""
  function = functools.partial(sample, STACK, num_tokens=num_tokens, **options)
  tokens = jnp.array([list(prompt)], jnp.int32)
  found = jax.jit(function)(params, tokens, jax.random.key(options.pop("seed", 0)))
  return bytes(found[0].tolist()).split(b"\0")[0].decode("utf-8", "replace")


def test_the_command_writes_what_the_newest_checkpoint_says(run, capsys):
  argv = [str(run), "--prompt", "Grüße", "--tokens=20", "--top-k=9"]
  assert cli.main(["generate", *argv]) == 0
  out, err = capsys.readouterr()
  assert out == "Grüße" + text_of(params(0), "Grüße".encode(), 20, top_k=9) + "\n"
  assert err == ""


def test_the_average_is_what_is_sampled(tmp_path):
  with Checkpoints(tmp_path / "checkpoints") as checkpoints:
    checkpoints.save(state(1, params(0), average=(params(1), {})))
  found = load_params.load(tmp_path, jax.eval_shape(lambda: params(0)))
  assert found.step == 1
  for a, b in zip(*map(jax.tree.leaves, (found.params, params(1))), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_damaged_checkpoint_is_passed_over_and_left(run, tmp_path, capsys):
  workdir = tmp_path / "copy"
  shutil.copytree(run, workdir)
  manifest = workdir / "checkpoints" / "5" / "manifest.json"
  manifest.write_text(manifest.read_text().replace('"step": 5', '"step": 6'))
  argv = [str(workdir), "--prompt=a", "--tokens=90"]
  assert cli.main(["generate", *argv]) == 0
  out, err = capsys.readouterr()
  assert out == "a" + text_of(params(1), b"a", 90) + "\n"
  damaged, long = err.splitlines()
  assert damaged.startswith(
    "note: skipping checkpoint 5, which is damaged (the manifest has changed)"
  )
  assert "up to 91 bytes" in long and "was trained with 64" in long
  assert manifest.exists()


def test_a_checkpoint_of_another_model_is_refused(run):
  other = make_transformer(vocab_size=256, num_layers=2, width=32, num_heads=4, hidden=24)
  shapes = jax.eval_shape(other.init, jax.random.key(0))
  with pytest.raises(ConfigError, match=r"params/embed/table is float32\[256, 16\]"):
    load_params.load(run, shapes)


WORDS = ["<eos>", *(f"\u2581{word}" for word in ("an", "apple", "and", "the", "tree"))]


def stand_in_for_a_tokenizer(name, separator, field):
  """Words with their spaces; as with Hugging Face, the first of a text loses its."""
  del separator
  if not Path(name).exists():
    raise ConfigError(f"{field}={name!r}: No such file or directory; use 'bytes' or x")

  def encode_each(documents):
    ids = [[WORDS.index(f"\u2581{w}") for w in d.decode().split()] for d in documents]
    return [np.array([*one, 0], np.uint8) for one in ids]

  def text(tokens):
    return "".join(WORDS[i] for i in tokens).replace("\u2581", " ").removeprefix(" ")

  def decode(tokens, before):
    return text([*before, *tokens]).removeprefix(text(before))

  return Tokenizer(name, len(WORDS), 0, encode_each, decode, None)


def write_tokenizer(path):
  """Write a tokenizer file of Hugging Face's, with words and their spaces."""
  tokenizers = pytest.importorskip("tokenizers")
  vocabulary = {word: i for i, word in enumerate(WORDS)}
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<eos>"))
  model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  model.decoder = tokenizers.decoders.Metaspace()
  model.save(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["fake", "package"])
def test_a_run_of_a_tokenizer_writes_its_text(which, tmp_path, capsys, monkeypatch):
  path = tmp_path / "tokenizer.json"
  if which == "package":
    write_tokenizer(path)
  else:
    path.write_text("{}")
    monkeypatch.setattr(generate, "read_tokenizer", stand_in_for_a_tokenizer)
  source = cfg.TextFiles(path="not/here", tokenizer=str(path))
  text = described(TextInfo("words", len(WORDS), 64, 4.0), source)
  (tmp_path / "config.json").write_text(json.dumps(text))
  stack = make_model(from_plain(cfg.Config, text["config"]), TextInfo("", 6, 64))
  made = stack.init(jax.random.key(0))  # all words nearly as likely
  with Checkpoints(tmp_path / "checkpoints") as checkpoints:
    checkpoints.save(state(1, made))

  def written(prompt, tokens, seed):
    function = functools.partial(sample, stack, num_tokens=9)
    found = jax.jit(function)(made, jnp.array([tokens]), jax.random.key(seed))
    ids = [*found[0].tolist(), 0]
    words = [WORDS[i][1:] for i in ids[: ids.index(0)]]
    return " ".join([*prompt.split(), *words]) + "\n", len(words)

  argv, lengths = [str(tmp_path), "--tokens=9"], []
  for seed, prompt, tokens in ((0, "an apple", [1, 2]), (1, "", [0]), (2, "", [0])):
    assert cli.main(["generate", *argv, f"--prompt={prompt}", f"--seed={seed}"]) == 0
    wanted, length = written(prompt, tokens, seed)
    assert capsys.readouterr().out == wanted
    lengths.append(length)
  assert 0 < min(lengths) < 9  # one document ends before
  assert cli.main(["generate", argv[0], "--prompt=an", "--tokens=64"]) == 0
  assert "up to 65 tokens" in capsys.readouterr().err
  path.unlink()
  assert cli.main(["generate", *argv]) == 2
  assert capsys.readouterr().err == (
    f"error: {tmp_path}: the 6 tokens of words are not bytes, and the "
    f"tokenizer cannot be loaded (TextFiles.tokenizer={str(path)!r}: No such file or "
    "directory); call jaxscale.run.generate.sample with token ids\n"
  )


def test_another_tokenizer_in_its_place_is_refused(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(generate, "read_tokenizer", stand_in_for_a_tokenizer)
  source = cfg.TFDSText(name="lm1b", tokenizer=str(tmp_path))
  text = described(TextInfo("words", 7, 64, 4.0), source)
  (tmp_path / "config.json").write_text(json.dumps(text))
  assert cli.main(["generate", str(tmp_path)]) == 2
  assert "has 6 tokens, but the run was trained with 7); call" in capsys.readouterr().err


MISTAKES = table("""
--tokens=3 | RUN: missing; try runs/digits
RUN --token=3 | did you mean '--tokens'?
RUN --prompt | --prompt: a value is missing
RUN --tokens=0 | --tokens=0: give a whole number >= 1
RUN --temperature=-1 | --temperature=-1: give a number >= 0
RUN --top-k=0 | --top-k=0: give a whole number >= 1
RUN --top-p=1.5 | --top-p=1.5: give a number in (0, 1]
RUN --seed=-1 | --seed=-1: give a whole number in [0, 4294967295]
nowhere | nowhere: no such run
EMPTY | the run has no checkpoint yet
IMAGES | the run trains on digits, not on text
BROKEN | config.json: no data in it; give the
WORDS | the 300 tokens of words are not bytes
NEWER | its config.json has Transformer.depth=3: Transformer has
""")


@pytest.mark.parametrize("argv, says", MISTAKES)
def test_a_mistake_is_one_line(run, tmp_path, argv, says, capsys):
  text = json.loads((run / "config.json").read_text())
  newer = json.loads((run / "config.json").read_text())
  newer["config"]["model"]["depth"] = 3
  made = dict(EMPTY=text, BROKEN={"config": text["config"]}, NEWER=newer)
  made |= dict(IMAGES=text | {"data": {"name": "digits"}})
  words = TextInfo("words", 300, 64, arrays={})
  made |= dict(WORDS=text | {"data": words._asdict()})
  for name, content in made.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(content))
  folders = {"RUN": str(run)} | {name: str(tmp_path / name) for name in made}
  assert cli.main(["generate", *(folders.get(word, word) for word in argv.split())]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and says in err
  assert err.count("\n") == 1
