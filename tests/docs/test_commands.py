"""The small commands, as they are typed."""

import pytest

from jaxscale import cli
from support.commands import error_line, run_train
from support.tables import table

DIGITS = "configs/digits.py"


MISTAKES = table(f"""
--drop | --drop: not an option, give one of --config, --help, --high, --low, --out, --steps
--step_s=30 --config {DIGITS} | did you mean '--steps'?
--config={DIGITS} --config.epoch=3 | did you mean 'epochs'?
--config | --config: a value is missing
--config {DIGITS} --out --steps=30 | --out: a value is missing
--config {DIGITS} --steps=0 | --steps=0: give a whole number >= 10
--steps=30 | --config: missing
--config=configs/nothing_like_it.py | no such file, check the path
--config=configs/digit.py | did you mean 'configs/digits.py'?
--config={DIGITS} --out=/dev/null/place.png | --out=/dev/null/place.png:
--config={DIGITS} --out=rates.docx | --out=rates.docx:
{DIGITS} | {DIGITS}: not an option; give a config as --config FILE
""")


@pytest.mark.parametrize("argv, says", MISTAKES)
def test_a_mistake_is_one_line(argv, says, capsys):
  assert cli.main(["lr-find", "--out=x.png", *argv.split()]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and err.count("\n") == 1
  assert says in err


def test_data_is_chosen_on_the_command_line(tmp_path):
  """A class whose field must be given, with that field, through the real command."""
  overrides = ["--config.data=ImageFolder", f"--config.data.path={tmp_path}/photos"]
  line = error_line(run_train(tmp_path / "run", *overrides), 2)
  assert f"--config.data.path={tmp_path}/photos: no such directory" in line
