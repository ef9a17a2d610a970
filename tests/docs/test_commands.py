"""The small commands, as they are typed."""

import pytest

from jaxscale import cli
from jaxscale.cli import plot_schedule
from support.commands import error_line, run_train
from support.tables import table

DIGITS, ALEXNET = "configs/digits.py", "configs/alexnet_bn_32k.py"


NAMED = f"""
{DIGITS} {ALEXNET}
--config {DIGITS} --config {ALEXNET}
--config={DIGITS} {ALEXNET}
--num-train=9 --config {DIGITS} --config={ALEXNET}
""".strip().splitlines()


@pytest.mark.parametrize("argv", NAMED)
def test_configs_are_named_as_in_other_commands_or_alone(argv):
  _, parser = cli.load("plot-schedule")
  args = parser.read([*argv.split(), "--out=schedule.png"])
  assert args.config + args.files == [DIGITS, ALEXNET]


def test_what_is_asked_for_is_drawn(tmp_path, capsys, monkeypatch):
  drawn = {}
  monkeypatch.setattr(plot_schedule, "plot", lambda curves, path: drawn.update(curves) or path)
  options = ["--out", f"{tmp_path}/a.svg", "--num-train=12800", "--config.epochs=3"]
  assert cli.main(["plot-schedule", *options, "--config", DIGITS]) == 0
  assert capsys.readouterr().out == f"{tmp_path}/a.svg\n"
  assert list(drawn) == [DIGITS] and len(drawn[DIGITS].rates) == 3 * 100
  assert drawn[DIGITS].rates.argmax() == 2 * 100  # its warm-up of two epochs


MISTAKES = table(f"""
--drop | --drop: not an option, give one of --config, --help, --num-train, --out
--num_train=3 {DIGITS} | did you mean '--num-train'?
--config.epoch=3 {DIGITS} | did you mean 'epochs'?
--config | --config: a value is missing
{DIGITS} --out --num-train=3 | --out: a value is missing
{DIGITS} --num-train=0 | --num-train=0: give a whole number >= 1
--num-train=3 | --config: missing
configs/nothing_like_it.py | no such file, check the path
configs/digit.py | did you mean 'configs/digits.py'?
{DIGITS} --num-train=100 | give 100 or less
{DIGITS} --out=/dev/null/place.png | --out=/dev/null/place.png:
{DIGITS} --out=rates.docx | --out=rates.docx:
""")


@pytest.mark.parametrize("argv, says", MISTAKES)
def test_a_mistake_is_one_line(argv, says, capsys):
  assert cli.main(["plot-schedule", "--out=x.png", *argv.split()]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and err.count("\n") == 1
  assert says in err


def test_data_is_chosen_on_the_command_line(tmp_path):
  """A class whose field must be given, with that field, through the real command."""
  overrides = ["--config.data=ImageFolder", f"--config.data.path={tmp_path}/photos"]
  line = error_line(run_train(tmp_path / "run", *overrides), 2)
  assert f"--config.data.path={tmp_path}/photos: no such directory" in line
