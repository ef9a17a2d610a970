"""The one command: its parser, its help, names of configs."""

import re
import shlex

import pytest

from jaxscale import cli
from jaxscale.cli.parser import Parser, whole
from jaxscale.config import packaged
from jaxscale.config.loading import load_config
from support.commands import run_python
from support.errors import config_error
from support.paths import ROOT
from support.tables import table


def parser():
  made = Parser("logs", "x")
  made.words("names", "RUN", "runs", missing="give a run")
  made.config("")
  made.flag("-f --follow", "follow")
  made.option("-n --lines N", "lines", whole(1))
  made.option("--kind KIND", "kinds", choices=("strong", "weak"), default="weak")
  return made


def test_options_settings_and_names_come_in_any_order():
  words = "a -f b --config.epochs 3 --lines=2 --config=x.py:y --config.a.b=c=d c"
  args = parser().read(words.split())
  assert args.names == ["a", "b", "c"] and args.follow and args.lines == 2
  assert args.config == "x.py:y" and args.kind == "weak"
  assert args.overrides == {"epochs": "3", "a.b": "c=d"}


MISTAKES = table("""
 | RUN: missing; give a run
a --knd=weak | --knd=weak: not an option, did you mean '--kind'?; write settings
a --kind=week | --kind=week: did you mean 'weak'?
a --kind | --kind: a value is missing, write --kind=VALUE
a --config --config.x=3 | --config: a value is missing
a --config.x | --config.x: a value is missing
a -n x | --lines=x: give a whole number >= 1
a --lines=0 | --lines=0: give a whole number >= 1
a --follow=3 | --follow: takes no value
a -x | -x: not an option
a --fol | --fol: not an option, did you mean '--follow'?
""")


@pytest.mark.parametrize("argv, says", MISTAKES)
def test_a_mistake_is_one_line(argv, says):
  with config_error() as e:
    parser().read(argv.split())
  assert str(e.value).startswith(says)


OF_COMMANDS = table("""
trian | trian: no such command, did you mean 'train'?
train | --config: missing; try --config digits
train digits | digits: not an option; give a config as --config FILE
train --config=digit | no packaged config, did you mean 'digits'?
train --config=digits --workdir= | --workdir=: give a directory
train --config=digits --workdir=gs://b/x | mount a bucket as one
train --confg digits | did you mean '--config'?
""")


@pytest.mark.parametrize("argv, says", OF_COMMANDS)
def test_a_mistake_of_a_command_is_one_line_and_code_2(argv, says, capsys):
  assert cli.main(argv.split()) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and err.count("\n") == 1
  assert says in err


def test_help_lists_every_command_and_each_has_a_page(capsys):
  assert cli.main(["--help"]) == 0
  overview = capsys.readouterr().out
  for name, command in cli.COMMANDS.items():
    assert f"  {name} " in overview and command.summary in overview
    assert cli.main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: jaxscale {name}") and "exit code: 0" in page
    (example,) = re.findall(rf"^example: jaxscale {name} (.+)$", page, re.M)
    cli.load(name)[1].read(shlex.split(example))  # its options exist
  assert cli.main([]) == 2 and capsys.readouterr().out == overview


def test_the_help_of_train_has_the_settings_of_the_config(capsys):
  argv = ["train", "--config", "digits", "--config.optimizer.lr=0.25", "--help"]
  assert cli.main(argv) == 0
  page = capsys.readouterr().out
  assert "--config.optimizer.lr = 0.25  (float > 0; required)\n      " in page


def test_the_help_of_train_is_short_and_leads_to_the_rest(capsys):
  assert cli.main(["train", "--help"]) == 0
  page = capsys.readouterr().out
  assert page.count("\n") <= 100 and 25 <= page.count("\n  --config.") <= 35
  types = "('float32' | 'bfloat16' | 'float16' | 'float8'; default:\n          'float32')"
  assert f"--config.dtype  {types}\n      The type" in page
  (names,) = re.findall(r"^Sections: ((?:.+\n)+)", page, re.M)
  for topic in [*re.findall(r"\w+", names), *re.findall(r"--help=([a-z]\S*\w)", page)]:
    assert cli.main(["train", f"--help={topic}"]) == 0
    assert "--config." in capsys.readouterr().out, topic
  assert cli.main(["submit", "--config=digits", "--help=optimizer"]) == 0
  assert "--config.optimizer.lr = 0.1  " in capsys.readouterr().out


@pytest.mark.parametrize(
  "topic, says",
  [
    ("optimiser", "did you mean 'optimizer'?"),
    ("xyz", "give one of adapter, all, checkpoint, checks,"),
  ],
)
def test_help_of_nothing_is_one_line_that_says_what_there_is(topic, says, capsys):
  assert cli.main(["train", f"--help={topic}"]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith(f"error: --help={topic}: no such setting") and says in err
  assert err.count("\n") == 1


def test_the_console_script_imports_little_before_it_answers_ctrl_c():
  """A Ctrl-C in the half second that the parser's import takes was a traceback."""
  code = (
    "import sys; from jaxscale.cli import entry\n"
    "print(*sorted(m for m in sys.modules if m.startswith('jaxscale')))"
  )
  done = run_python("-c", code)
  few = "jaxscale jaxscale.cli jaxscale.cli.start jaxscale.errors jaxscale.lazy\n"
  assert done.stdout == few, done.stderr


@pytest.mark.parametrize("flags", [[], ["-OO"]], ids=["", "without docstrings"])
def test_help_and_mistakes_come_without_jax(flags):
  code = (
    "import sys; from jaxscale import cli\n"
    "for name in cli.COMMANDS: cli.main([name, '--help'])\n"
    "cli.main(['train', '--config=digits', '--config.epoch=3'])\n"
    "assert 'jax' not in sys.modules"
  )
  done = run_python(*flags, "-c", code)
  assert done.returncode == 0 and "did you mean 'epochs'?" in done.stderr, done.stderr
  assert ("PYTHONOPTIMIZE=2 strips docstrings" in done.stdout) == bool(flags)


def test_packaged_configs_have_names(tmp_path, monkeypatch):
  assert packaged.locate("digits") == "configs/digits.py"
  assert load_config("digits") == load_config("configs/digits.py")
  monkeypatch.chdir(tmp_path)
  assert packaged.locate("resnet50_lars:8192") == (f"{ROOT}/configs/resnet50_lars.py:8192")
  assert packaged.locate("mine.py:x") == "mine.py:x"
