"""docs/2017.md: its arithmetic is of our models, what is planned is in the backtest."""

import json
import math
import re

import jax
import pytest

from jaxscale import models
from support.paths import ROOT

PAGE = (ROOT / "docs/2017.md").read_text()
IMAGES = 1_281_167


@pytest.mark.parametrize(
  ("module", "size", "epochs", "column"),
  [
    (models.AlexNetModule(num_classes=1000), 227, 100, 0),
    (
      models.ResNetModule((3, 4, 6, 3), bottleneck=True, num_classes=1000), 224, 90, 1
    ),
  ],
  ids=["alexnet", "resnet50"],
)  # fmt: skip
def test_steps_and_bytes_are_of_our_models(module, size, epochs, column):
  init = models.functions(module, (size, size, 3)).init
  params, _ = jax.eval_shape(init, jax.random.key(0))
  count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
  assert f"{count:,}" in PAGE
  rows = re.findall(
    r"^\| ([\d,]+) \| ([\d,]+) \| (.*?) TB \| ([\d,]+) \| (.*?) TB \|", PAGE, re.M
  )
  assert len(rows) == 5
  for batch, *cells in rows:
    steps = math.ceil(epochs * IMAGES / int(batch.replace(",", "")))
    sent = f"{steps * 4 * count / 1e12:.2f}"
    assert cells[2 * column : 2 * column + 2] == [f"{steps:,}", sent]


def test_what_is_planned_is_in_the_backtest():
  rows = json.loads((ROOT / "benchmarks/results/backtest.json").read_text())["rows"]
  names = "rate", "planned_rate", "slowest", "fastest"
  known = {f"{row[name]:,.0f}" for row in rows for name in names if name in row}
  planned = re.findall(r"^Planned: .*?\n\n", PAGE, re.M | re.S)
  numbers = [n for text in planned for n in re.findall(r"\d+,\d{3}(?! \w* ?KNL)", text)]
  assert len(numbers) == 10
  assert known.issuperset(numbers), {*numbers} - known
