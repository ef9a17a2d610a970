"""Layouts: which device has which part of a model, and what follows for a step.

`rules` say by paths which dim of a parameter is split along which mesh axis; a
`Layout` makes of that how a model is sharded between steps, how its parameters are
gathered (fsdp_gather.py) and where gradients go. `run_stack` runs a model of stacked
layers under it. Models know nothing of layouts, and layouts no Config.
"""

from jaxscale.parallel.fsdp_gather import with_gathered_params
from jaxscale.parallel.layout import Layout, make_layout, replicated_layout
from jaxscale.parallel.rules import Rule, largest, partition
from jaxscale.parallel.run_stack import (
  PipelineGrads,
  gpipe_grads,
  one_f_one_b_grads,
  stack_loss,
  stack_totals,
)

__all__ = [
  "Layout", "PipelineGrads", "Rule", "gpipe_grads", "largest", "make_layout",
  "one_f_one_b_grads", "partition", "replicated_layout", "stack_loss", "stack_totals",
  "with_gathered_params",
]  # fmt: skip
