"""Loops over layers and remat in programs for an H100, which need not be present."""

import os
import re

import pytest

from support.commands import run_python
from support.paths import ROOT
from unit.test_gpu_programs import COMPILERS

LAYERS, ROWS = 3, 4
COMPILE = f"""
import dataclasses, sys
from jaxscale import config as cfg
from jaxscale.experiment import build
from jaxscale.planning.topologies import find_chips
from unit.test_gpu_programs import text

config = text()
model = dataclasses.replace(config.model, num_layers={LAYERS})
remat, unroll = sys.argv[1:]
layout = cfg.Layout(remat=remat, unroll=int(unroll) if unroll.isdigit() else None)
config = dataclasses.replace(config, model=model, layout=layout, batch_size={ROWS})
data = config.data.abstract({ROWS})
made = build.experiment(config, devices=find_chips("h100-1").devices, datasets=data)
sys.stdout.write(made.lower_train_step().compile().as_text())
"""
FORWARD, BACKWARD = '"__cudnn$fmhaSoftmax"', '"__cudnn$fmhaSoftmaxBackward"'
# Arrays of what all layers store, which a loop clears first.
CLEARED = rf"\w+\[{LAYERS},{ROWS},[\d,]+\]\S* broadcast\("


def compiled(remat, unroll):
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  env = dict(PYTHONPATH=path, PYTHONWARNINGS="default", JAX_PLATFORMS="cpu")
  done = run_python("-c", COMPILE, remat, unroll, timeout=600, **env)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not COMPILERS, reason="no compiler for GPUs is installed")
@pytest.mark.parametrize(
  "remat, unroll, calls, backward",
  [
    ("none", "1", 1, 1),
    ("dots", "1", 2, 1),  # one in the backward loop, too
    ("dots_attention", "1", 1, 1),
    ("none", "default", LAYERS, LAYERS),
    ("dots_attention", "default", LAYERS, LAYERS),
    ("dots", "default", 2 * LAYERS, LAYERS),
  ],
)
def test_attention_is_computed_once_and_nothing_is_cleared(remat, unroll, calls, backward):
  text = compiled(remat, unroll)
  assert (text.count(FORWARD), text.count(BACKWARD)) == (calls, backward)
  is_loop = unroll == "1"
  assert bool(re.search(CLEARED, text)) == is_loop
  assert (" while(" in text) == is_loop
