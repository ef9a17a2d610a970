"""The largest models of docs/parallelism.md are what it says."""

import json

import jax
import pytest

from jaxscale.config.loading import load_config
from jaxscale.experiment.model import make_model
from jaxscale.hlo import Memory
from jaxscale.planning.topologies import CHIPS
from support.paths import ROOT

RESULTS = json.loads((ROOT / "benchmarks" / "results" / "parallel.json").read_text())
ROWS = {row["case"]: row for row in RESULTS["rows"]}


@pytest.mark.parametrize(
  "size, chips, least, most",
  [("1b", ("v5e-16", "h100-16"), 1.0e9, 1.2e9), ("7b", ("v5e-256", "h100-256"), 6.7e9, 6.8e9)],
)
def test_the_models_fit_below_the_memory_of_their_chips(size, chips, least, most):
  """Compare compilers' reports; the sizes are TinyLlama's and Llama 2's."""
  config = f"configs/llama_{size}.py"
  settings = load_config(config)
  stack = make_model(settings, settings.data.abstract(settings.batch_size)[0].info)
  params = jax.eval_shape(stack.init, jax.random.key(0))
  assert least < sum(x.size for x in jax.tree.leaves(params)) < most
  for name in chips:
    row = ROWS[f"{size.upper()} {name}"]
    assert row["changes"] == {} and row["config"].startswith(config)
    assert Memory(**row["memory"]).total < CHIPS[name.split("-")[0]].limit
