"""Out of a run into a file, and from a file into a run, as it is typed."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import cli, models, weights
from jaxscale import config as cfg
from jaxscale.checkpoint import checkpoint_files
from jaxscale.config.loading import load_config
from jaxscale.config.record import FORMAT, to_plain
from jaxscale.experiment import build
from jaxscale.models.hf_config import llama_config
from jaxscale.run import model_files
from jaxscale.run.fit import fit
from jaxscale.run.workdir import describe, write_config
from jaxscale.training.types import TrainState
from jaxscale.weights import export_safetensors, import_safetensors
from jaxscale.weights.safetensors import read_header
from support.configs import tiny_digits
from support.errors import config_error
from support.paths import ROOT
from support.saving import save
from support.trees import assert_same_bits


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Return the last state of an MLP run with an average of its parameters, and its workdir."""
  workdir = tmp_path_factory.mktemp("run")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    return fit(tiny_digits(epochs="2"), workdir), workdir


def typed(capsys, *argv):
  code = cli.main(["export", *map(str, argv)])
  out, err = capsys.readouterr()
  return code, (err or out).rstrip("\n")


def saved(workdir, experiment, state):
  """Write the workdir of a run that has just started."""
  workdir.mkdir(exist_ok=True)
  (workdir / "config.json").write_text(json.dumps(describe(experiment)))
  save(workdir / "checkpoints", state)


@pytest.mark.slow
def test_a_run_starts_from_what_another_has_learnt(finished, tmp_path, capsys, reported):
  result, workdir = finished
  path = tmp_path / "digits.safetensors"
  code, line = typed(capsys, workdir, "--to", path)
  assert code == 0 and line.endswith("0.0 MB in jaxscale's names")
  assert f"{path}: the average of step {result.state.step}" in line
  about = read_header(path)[1]
  assert about["data"] == "digits" and about["step"] == str(result.state.step)
  assert json.loads(about["model"])["class"] == "MLP"

  config = tiny_digits(init_from=str(path), seed="7", epochs="2")
  state = build.experiment(config).init_state()
  (line,) = reported
  assert line.startswith(f"parameters from {path}: 2,410 numbers in 4 arrays, float32")
  assert_same_bits((state.params, state.model_state), result.state.average)
  assert_same_bits(state.average, result.state.average)
  assert not any(map(np.any, jax.tree.leaves((state.opt_state, state.step))))
  # It resumes from there, and then from its own checkpoint without the file.
  again = fit(config, tmp_path / "again")
  assert line in capsys.readouterr().out
  assert again.summary["accuracy"] > result.summary["accuracy"]
  path.unlink()
  assert fit(config, tmp_path / "again").summary["outcome"] == "done"
  with config_error(match=r"init_from is .* in the workdir and None now"):
    fit(tiny_digits(seed="7", epochs="2"), tmp_path / "again")


def test_a_run_in_place_of_a_file_is_refused_with_the_command(finished, tmp_path, capsys):
  _, workdir = finished
  with config_error(f"{workdir}: has neither model.safetensors nor") as error:
    fit(tiny_digits(init_from=str(workdir), epochs="2"), tmp_path / "again")
  command = re.search("give (.*), after `jaxscale export (.*)`$", str(error.value))
  assert typed(capsys, *command[2].split())[0] == 0
  assert import_safetensors(command[1], finished[0].state.params)


def test_the_parameters_of_the_last_step_can_be_taken(finished, tmp_path, capsys):
  result, workdir = finished
  path, step = tmp_path / "a.safetensors", int(result.state.step)
  options = (workdir, "--to", path, "--take=params", "--step", step)
  assert typed(capsys, *options)[0] == 0
  found = import_safetensors(path, result.state.params)
  assert_same_bits(found.params, result.state.params)
  assert typed(capsys, *options, "--dtype=bfloat16")[0] == 0
  half = import_safetensors(path, result.state.params).params
  wanted = jax.tree.map(lambda x: x.astype(jnp.bfloat16), result.state.params)
  assert_same_bits(half, jax.tree.map(lambda x: x.astype(jnp.float32), wanted))


def test_a_checkpoint_of_a_resnet_becomes_timms_file(tmp_path, capsys):
  """With the average of its statistics, on which it is evaluated."""
  model = models.ResNetModule(num_classes=7, stage_sizes=(2, 1), bottleneck=True, width=4)
  fns = models.functions(model, (32, 32, 3))
  shapes = jax.eval_shape(fns.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  last, average = (
    jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape, np.float32)), shapes) for _ in range(2)
  )
  made = TrainState(jnp.int32(3), *last, (), (), average, ())
  save(tmp_path / "checkpoints", made)
  info = {"name": "x", "num_classes": 7, "mean": [0], "std": [1]}
  described = {"format": FORMAT, "config": {"model": {"class": "ResNet"}}, "data": info}
  (tmp_path / "config.json").write_text(json.dumps(described))
  path = tmp_path / "resnet.safetensors"
  code, line = typed(capsys, tmp_path, "--to", path, "--naming", "timm")
  assert code == 0, line
  assert line.endswith(
    "(the config.json in this folder belongs to another file, so none is written)"
  )
  entries, about = read_header(path)
  assert entries["layer1.1.bn3.running_var"].shape == (16,)
  assert entries["layer2.0.downsample.1.num_batches_tracked"].dtype == np.int64
  assert about["format"] == "pt"
  found = import_safetensors(path, made.params, made.model_state)
  assert_same_bits((found.params, found.model_state), made.average)


@pytest.mark.parametrize("naming", ["timm", "huggingface"])
def test_a_folder_of_a_vit_says_what_its_parameters_mean(naming, tmp_path, capsys, reported):
  like = dict(model="ViT", model__patch="4", model__width="32", model__num_layers="1")
  experiment = build.experiment(tiny_digits(**like, model__num_heads="2"))
  workdir, path = tmp_path / "run", tmp_path / "out" / "model.safetensors"
  path.parent.mkdir()
  saved(workdir, experiment, experiment.init_state())
  code, line = typed(capsys, workdir, "--to", path, "--naming", naming)
  assert code == 0 and line.endswith(f"in {naming}'s names"), line
  written = json.loads((path.parent / "config.json").read_text())
  names = {"timm": "vit_base_patch16_224", "huggingface": ["ViTForImageClassification"]}
  assert written.get("architecture", written.get("architectures")) == names[naming]
  # A model of other heads does not take it; that of the run does, without a word more.
  like["init_from"] = str(path.parent)
  with config_error(match=r"_heads is 2 in the file and 4 in the model, set ViT"):
    build.experiment(tiny_digits(**like, model__num_heads="4")).init_state()
  build.experiment(tiny_digits(**like, model__num_heads="2")).init_state()
  (line,) = reported
  assert line.endswith(f"{naming}'s names")


def test_a_classifier_of_other_classes_starts_anew_if_asked_to(tmp_path, reported):
  experiment = build.experiment(tiny_digits())
  fresh = experiment.init_state()
  params = jax.tree.map(lambda x: x + 1, fresh.params)
  head = params["Dense_1"]
  params["Dense_1"] = {"kernel": head["kernel"][:, :7], "bias": head["bias"][:7]}
  path = tmp_path / "seven"
  export_safetensors(path, params)
  with config_error(match="set init_head=True to initialize the classifier anew"):
    build.experiment(tiny_digits(init_from=str(path))).init_state()
  asked = tiny_digits(init_from=str(path), init_head="True")
  state = build.experiment(asked).init_state()
  assert reported[0].endswith("; the classifier is newly initialized")
  assert_same_bits(state.params["Dense_0"], params["Dense_0"])
  assert_same_bits(state.params["Dense_1"], fresh.params["Dense_1"])
  with config_error(match=r"init_head=True: needs init_from; set it"):
    tiny_digits(init_head="True")


def test_workers_that_train_alone_start_from_it_too(tmp_path):
  path = tmp_path / "a"
  options = dict(sync="LocalSGD", sync__sync_every_steps="2", ema_decay="None")
  made = build.experiment(tiny_digits(**options)).init_state()
  params = jax.tree.map(lambda x: x + 1, made.params)
  export_safetensors(path, params)
  state = build.experiment(tiny_digits(init_from=str(path), **options)).init_state()
  assert_same_bits(state.params, params)
  for worker in range(8):
    own = jax.tree.map(lambda x, i=worker: x[i], state.exchange_state.params)
    assert_same_bits(own, params)


def language(**changes):
  """Return the config of a small language model with few default values."""
  base = dict(model__num_layers="2", model__head_width="16")
  base |= dict(model__rope_theta="5e3", model__norm_eps="1e-4")
  dotted = {k.replace("__", "."): v for k, v in (base | changes).items()}
  return load_config("tests/support/tiny_language.py", dotted)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
  """Return the workdir of a run that has just started, and its state."""
  path = tmp_path_factory.mktemp("spoken")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    experiment = build.experiment(language())
  state = experiment.init_state()
  saved(path, experiment, state)
  return state, path


def test_a_folder_for_transformers_says_what_its_parameters_mean(spoken, tmp_path, capsys):
  _, workdir = spoken
  path, config_json = tmp_path / "model.safetensors", tmp_path / "config.json"
  options = (workdir, "--to", path, "--naming=huggingface")
  assert typed(capsys, *options)[0] == 0
  reported = json.loads(config_json.read_text())
  wanted = dict(architectures=["LlamaForCausalLM"], head_dim=16, torch_dtype="float32")
  assert wanted.items() <= reported.items()
  entries, _ = read_header(path)
  assert entries["model.embed_tokens.weight"].shape == (256, 32)
  # Its own may be replaced, and no other.
  assert typed(capsys, *options, "--dtype=bfloat16")[0] == 0
  assert json.loads(config_json.read_text()) == reported | {"torch_dtype": "bfloat16"}
  for to in (tmp_path / "other.safetensors", workdir / "model.safetensors"):
    kept = (to.parent / "config.json").read_text()
    code, line = typed(capsys, workdir, "--to", to, "--naming=huggingface")
    assert code == 2 and "write to a folder of its own" in line
    assert (to.parent / "config.json").read_text() == kept and not to.exists()
  # Another model of the same shapes does not take it: unit/test_hf_config.py.
  with config_error(str(config_json), "set Transformer.rope_theta=5000.0"):
    build.experiment(language(init_from=str(tmp_path), model__rope_theta="1e4")).init_state()


# Files next to pretrained weights; a run only copies them.
KEPT = {"tokenizer.json": '{"added_tokens": []}', "chat_template.jinja": "{{ x }}"}
KEPT |= {"generation_config.json": '{"eos_token_id": [2, 7], "top_p": 0.9}'}
KEPT |= {"tokenizer_config.json": '{"eos_token": "</s>"}'}


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_has_what_was_next_to_the_pretrained_weights(tied, tmp_path, capsys):
  pretrained, workdir, to = tmp_path / "pretrained", tmp_path / "run", tmp_path / "a" / "b"
  plain = dict(model__tied=str(tied), model__hidden="64", model__pad_vocab_to="320")
  experiment = build.experiment(language(**plain))
  model = experiment.config.model
  about = llama_config(model, hidden=64, vocab_size=320, sequence_length=999, dtype="bfloat16")
  about |= {"bos_token_id": 1, "eos_token_id": 2, "model_type": "mistral", "use_cache": True}
  about |= {"architectures": ["MistralForCausalLM"], "sliding_window": None}
  path = pretrained / "model.safetensors"
  export_safetensors(path, experiment.init_state().params, naming="huggingface", num_classes=320)
  (pretrained / "config.json").write_text(json.dumps(about))
  for name, text in KEPT.items():
    (pretrained / name).write_text(text)

  assert to_plain(models.from_folder(pretrained)) == to_plain(model)
  config = dataclasses.replace(experiment.config, init_from=str(pretrained))
  state = build.experiment(config).init_state()
  workdir.mkdir()
  write_config(workdir, describe(build.experiment(config)), config)
  save(workdir / "checkpoints", state)
  shutil.rmtree(pretrained)
  code, line = typed(capsys, workdir, "--to", to, "--naming=huggingface")
  assert code == 0 and f"{to}/model.safetensors: the average of step 0" in line, line
  found = json.loads((to / "config.json").read_text())
  assert about | {"torch_dtype": "float32", "eos_token_id": [2, 0]} == {k: found[k] for k in about}
  generation = json.loads((to / "generation_config.json").read_text())
  assert generation == {"bos_token_id": 1, "eos_token_id": [2, 7, 0], "top_p": 0.9}
  entries, _ = read_header(to / "model.safetensors")
  assert ("lm_head.weight" in entries) != tied
  # The rows of the tokens that the data lack are those of the pretrained model.
  assert entries["model.embed_tokens.weight"].shape == (320, 32)
  again = import_safetensors(to, state.params)
  assert_same_bits(again.params, state.params)
  # Tokens are bytes here, so they have no tokenizer.
  assert line.endswith("; no tokenizer is known, so none is written")
  ids = dataclasses.replace(config, data=cfg.TextFiles(path="x", vocab_size=300))
  for name, text in KEPT.items():
    pretrained.mkdir(exist_ok=True)
    (pretrained / name).write_text(text)
  model_files.keep(ids, workdir)
  code, line = typed(capsys, workdir, "--to", to, "--naming=huggingface")
  assert code == 0 and line.endswith(", with its tokenizer")
  for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
    assert (to / name).read_text() == KEPT[name]


def test_settings_without_pretrained_files_remove_those_of_earlier_settings(tmp_path):
  (tmp_path / "tokenizer.json").write_text("{}")
  with_tokenizer = cfg.TextFiles(path="x", tokenizer=str(tmp_path))
  workdir = tmp_path / "run"
  workdir.mkdir()
  model_files.keep(dataclasses.replace(language(), data=with_tokenizer), workdir)
  assert (workdir / model_files.FOLDER / "tokenizer.json").exists()
  model_files.keep(language(), workdir)
  assert not (workdir / model_files.FOLDER).exists()


MISTAKES = """
--too=x                                           did you mean '--to'?
--to=x.safetensors                    RUN: missing; try runs/digits
x                                     --to: missing
x --to                                --to: a value is missing
x --to=x.safetensors --naming=tim     did you mean 'timm'?
x --to=x.safetensors --step=last      --step=last: give a step, or best
/no --to=x.safetensors                /no: no such run
""".strip().splitlines()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, capsys):
  argv, says = re.split("   +", mistake)
  code, line = typed(capsys, *argv.split())
  assert code == 2 and says in line and line.startswith("error: ") and "\n" not in line


def test_what_the_run_has_not_is_one_line(finished, tmp_path, capsys, monkeypatch):
  result, workdir = finished
  step = int(result.state.step)

  def line(*argv, code=2):
    found, reported = typed(capsys, workdir, *argv)
    assert found == code and reported.startswith("error: ") and "\n" not in reported
    return reported

  assert f"step=1: no checkpoint of this step; use one of {step - 1}, {step}" in line(
    "--to=x.safetensors", "--step=1"
  )
  timm = line("--to=x.safetensors", "--naming=timm")
  assert "naming=timm: has no name for params/Dense_0/bias" in timm
  (tmp_path / "file").touch()
  in_file = tmp_path / "file" / "x.safetensors"
  assert "give a .safetensors file or a folder" in line("--to", in_file)
  (tmp_path / "file").unlink()
  (damaged,) = (workdir / "checkpoints" / str(step) / "state" / "d").iterdir()
  whole = damaged.read_bytes()
  damaged.write_bytes(whole[: len(whole) // 2])
  try:
    assert f"checkpoint {step} in {workdir} is damaged (" in line(
      "--to", tmp_path / "x.safetensors"
    )
  finally:
    damaged.write_bytes(whole)
  monkeypatch.setattr(checkpoint_files, "is_of", lambda *_: False)
  flipped = line("--to", tmp_path / "x.safetensors")
  assert "damaged (the checksum of average/0/Dense_0/bias does not match)" in flipped
  assert not list(tmp_path.iterdir())


def test_namings_are_the_choices():
  _, parser = cli.load("export")
  choices = {action.dest: action.choices for action in parser._actions}
  assert choices["naming"] == weights.NAMINGS
