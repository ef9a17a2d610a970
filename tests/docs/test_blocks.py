"""The commands in README.md and docs/ as they stand."""

import json
import re
import shlex
from typing import NamedTuple

import jax
import pytest

from jaxscale import cli
from jaxscale.cli.train import default_workdir
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.run.workdir import claim_workdir
from support.commands import run_python
from support.configs import recorded
from support.paths import ROOT

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in DOCS)]
# What a reader fills in, and files of the reader's own.
BLANKS = {"…": "configs/digits.py", "FILE": "configs/digits.py", "DIR": "/tmp"}
OWN_FILES = ("mine.py", "mine.py:large", "flowers.py", "digits.py", "storage.py")
OWN_FILES += ("runs/digits/config.json", "runs/noise")
OFFLINE = ("Digits", "Text")  # data that are always there


class Command(NamedTuple):
  """A command line of a page; `argv` begins with the program, as `jaxscale`."""

  page: str
  env: dict[str, str]
  argv: tuple[str, ...]

  def __str__(self):
    return shlex.join(self.argv)


def commands(page):
  """Return the command lines in a page's shell blocks."""
  text, found = (ROOT / page).read_text(), []
  for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S):
    if language not in ("", "bash", "sh"):
      continue
    exported = {}
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
      line = line.strip().removeprefix("$ ").partition("   #")[0]
      try:
        words = shlex.split(line)
      except ValueError:  # a table, or what a program prints
        continue
      env = dict(exported)
      export = words[:1] == ["export"]
      words = words[export:]
      while words and re.fullmatch(r"[A-Z]\w+=\S*", words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
      if export:
        exported = env
      if argv := program(words):
        found.append(Command(page, env, tuple(argv)))
  return found


def program(words):
  """Return the words of a jaxscale command after its program; None for other commands."""
  if words[:1] == ["srun"]:
    return program([w for w in words[1:] if not w.startswith("--ntasks")])
  first, *rest = [*words, ""]
  name, rest = first.rpartition("/")[2], [w for w in rest if w not in ("", "-P")]
  if name == "python" and rest[:2] == ["-m", "jaxscale.train"]:
    return ["jaxscale", "train", *rest[2:]]
  if name == "python" and rest[0].endswith(".py"):
    return ["python", *rest]
  if name == "jaxscale" and rest and re.fullmatch(r"[a-z-]+", rest[0]):
    return ["jaxscale", *rest]
  return None


COMMANDS = [c for page in PAGES for c in commands(page)]
OURS = [c for c in COMMANDS if c.argv[0] == "jaxscale"]


def parsed(command):
  _, name, *rest = command.argv
  blank = re.compile(r"(?<![\w/.])(…|FILE|DIR)$")
  filled = [blank.sub(lambda match: BLANKS[match.group()], word) for word in rest]
  return name, cli.load(name)[1].read(filled)


def config_of(args):
  """Return the config of a command; None without one, or if it is a reader's own file."""
  config = getattr(args, "config", None)
  if not config or isinstance(config, list) or config in OWN_FILES:
    return None
  return load_config(config, args.overrides)


def test_the_pages_have_commands():
  assert len(OURS) > 30 and {c.page for c in OURS} >= {"README.md", "docs/exchange.md"}


@pytest.mark.parametrize("command", OURS, ids=str)
def test_options_and_config_exist(command):
  _, args = parsed(command)
  config_of(args)


def test_configs_fit_the_devices_of_their_commands():
  fitting = 0
  for command in OURS:
    name, args = parsed(command)
    config = config_of(args) if name == "train" else None
    if config is None:
      continue
    if type(config.data).__name__ in OFFLINE:
      count = int(command.env.get("JAX_NUM_CPU_DEVICES", "1"))
      build.experiment(config, devices=jax.devices()[:count])
      fitting += 1
  assert fitting > 10


@pytest.mark.parametrize("page", PAGES)
def test_no_command_finds_its_workdir_taken(page, tmp_path):
  """Typed one after another, each by someone who typed `make train` before."""
  first = Command(page, {}, ("jaxscale", "train", "--config", "configs/digits.py"))
  typed = [c for c in commands(page) if c.argv[:2] == first.argv[:2]]
  for command in [first, *typed]:
    _, args = parsed(command)
    if args.help or "…" in command.argv or (config := config_of(args)) is None:
      continue
    workdir = tmp_path / (args.workdir or default_workdir(args.config))
    claim_workdir(workdir, config)
    (workdir / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(recorded(config)))


def test_scripts_of_the_pages_have_their_options():
  for command in COMMANDS:
    if command.argv[0] == "python":
      text = (ROOT / command.argv[1]).read_text()
      for word in command.argv[2:]:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in text, word


# Quick and without the network: the rest trains for minutes, or asks for a cluster.
RUN = (
  "jaxscale bench",
  "jaxscale describe",
  "jaxscale train --config configs/digits.py --workdir runs/lars",
)


# Once, where several pages have it.
QUICK = {str(c): c for c in OURS if str(c).startswith(RUN) and "…" not in str(c)}


def named_on(page):
  """Return the code words of a page of the reference, `a/STEP/` also as `a`."""
  text = (ROOT / "docs" / "reference" / page).read_text()
  names = re.findall(r"`([\w./]+)`", text)
  return {*names, *(name.partition("/")[0] for name in names)}


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK.values(), ids=str)
def test_the_quick_ones_do_what_they_say(command, tmp_path):
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  env = {"PYTHONPATH": str(ROOT)} | command.env
  done = run_python("-m", *command.argv, cwd=tmp_path, **env)
  assert done.returncode == 0, done.stderr
  if command.argv[1] == "train":
    assert ": reached)" in done.stdout
    workdir = tmp_path / "runs" / "lars"
    assert {path.name for path in workdir.iterdir()} <= named_on("files.md")
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    written = {name for line in lines for name in line}
    written |= json.loads((workdir / "summary.json").read_text()).keys()
    assert len(written) > 30 and written <= named_on("metrics.md")


def test_code_beside_that_of_keras_trains(tmp_path, monkeypatch, capsys):
  text = (ROOT / "docs" / "howto" / "coming_from.md").read_text()
  (code,) = re.findall(r"^```python instead_of_keras\n(.*?)^```", text, re.M | re.S)
  monkeypatch.chdir(tmp_path)
  exec(compile(code, "coming_from.md", "exec"), {})
  *_, accuracy, labels = capsys.readouterr().out.splitlines()
  assert float(accuracy) > 0.95 and re.fullmatch(r"\[[01] [01] [01]\]", labels)


def test_the_config_beside_hugging_faces_code_is_one(tmp_path):
  text = (ROOT / "docs" / "howto" / "coming_from.md").read_text()
  (code,) = re.findall(r"^```python flowers\n(.*?)^```", text, re.M | re.S)
  (tmp_path / "flowers.py").write_text(code)
  config = load_config(str(tmp_path / "flowers.py"))
  assert (config.batch_size, config.dtype, config.model.num_heads) == (512, "bfloat16", 12)


def test_the_config_beside_lightnings_code_trains(tmp_path):
  text = (ROOT / "docs" / "howto" / "coming_from.md").read_text()
  (code,) = re.findall(r"^```python mine\n(.*?)^```", text, re.M | re.S)
  (tmp_path / "mine.py").write_text(code)
  config = load_config(str(tmp_path / "mine.py"))
  assert build.experiment(config, devices=jax.devices()[:8]).derived.device_batch_size == 64
