"""The page's tables are those of the results, and the largest models what they say."""

import json
import sys

import pytest

from jaxscale.config.loading import load_config
from jaxscale.experiment.model import make_model
from support.paths import ROOT

RESULTS = json.loads((ROOT / "benchmarks" / "results" / "parallel.json").read_text())
ROWS = {row["case"]: row for row in RESULTS["rows"]}


def test_the_tables_are_those_of_the_results(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
  from parallel_table import tables

  page = (ROOT / "docs" / "parallelism.md").read_text()
  for part, table in tables(RESULTS["rows"]).items():
    missing = [line for line in table.splitlines() if line not in page]
    assert not missing, f"{part}: python benchmarks/parallel.py --table"
  sys.modules.pop("parallel_table", None)


@pytest.mark.parametrize(
  "config, chips, least, most",
  [
    ("configs/llama_1b.py", ("v5e-16", "h100-16"), 1.0e9, 1.2e9),
    ("configs/llama_7b.py", ("v5e-256", "h100-256"), 6.7e9, 6.8e9),
  ],
)
def test_the_models_fit_below_the_memory_of_their_chips(config, chips, least, most):
  """Compare compilers' reports; the sizes are TinyLlama's and Llama 2's."""
  import jax

  from jaxscale.hlo import Memory
  from jaxscale.planning.topologies import CHIPS

  settings = load_config(config)
  stack = make_model(settings, settings.data.abstract(settings.batch_size)[0].info)
  params = jax.eval_shape(stack.init, jax.random.key(0))
  assert least < sum(x.size for x in jax.tree.leaves(params)) < most
  for name in chips:
    size = {"configs/llama_1b.py": "1B", "configs/llama_7b.py": "7B"}[config]
    row = ROWS[f"{size} {name}"]
    assert row["changes"] == {} and row["config"].startswith(config)
    assert Memory(**row["memory"]).total < CHIPS[name.split("-")[0]].limit
