"""Layouts: which device holds which part of a model, and what follows for a step.

A model knows nothing of them. `rules` say by paths which dim of a parameter is split
along which mesh axis; a `Layout` makes of that how parameters lie between steps,
what a layer needs to run, and where its gradient goes. `stacked` runs a model of
stacked layers under it.
"""

from jaxscale.parallel.entering import entered
from jaxscale.parallel.layout import Layout, make_layout, whole
from jaxscale.parallel.pipelined import (
  OwnGrads,
  gpipe_grads,
  one_f_one_b_grads,
  piped_totals,
)
from jaxscale.parallel.rules import Rule, largest, partition
from jaxscale.parallel.stacked import stack_loss, stack_totals

__all__ = [
  "Layout", "OwnGrads", "Rule", "entered", "gpipe_grads", "largest", "make_layout",
  "one_f_one_b_grads", "partition", "piped_totals", "stack_loss", "stack_totals",
  "whole",
]  # fmt: skip
