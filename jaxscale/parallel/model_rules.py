"""How the parameters of jaxscale's models are split.

The first matrices of a branch by columns along `model`, the last by rows
(`tensor`); what `fsdp` splits is the other dim, so that both go together; layers along
`stage` by their first dim. Vectors are small, and whole but along `model`, where they
belong to columns.
"""

from __future__ import annotations

from jaxscale.parallel.rules import Rule, largest

TRANSFORMER = (
  Rule("embed/table", ("model", "fsdp")),
  Rule("layers/(q|k|v|gate|up)/kernel", ("stage", "fsdp", "model")),
  Rule("layers/(o|down)/kernel", ("stage", "model", "fsdp")),
  Rule("layers/.*norm/scale", ("stage", None)),
  Rule("head/norm/scale", (None,)),
  Rule("head/kernel", ("fsdp", "model")),
)

VIT = (
  Rule("embed/patch/kernel", (None, "fsdp")),
  Rule("embed/(patch/bias|class_token)", (None,)),
  Rule("embed/position", (None, None)),
  Rule("layers/(q|k|v|up)/kernel", ("stage", "fsdp", "model")),
  Rule("layers/(q|k|v|up)/bias", ("stage", "model")),
  Rule("layers/(o|down)/kernel", ("stage", "model", "fsdp")),
  Rule("layers/(o|down)/bias", ("stage", None)),
  Rule("layers/.*norm/(scale|bias)", ("stage", None)),
  Rule("head/norm/(scale|bias)", (None,)),
  Rule("head/kernel", ("fsdp", "model")),
  Rule("head/bias", ("model",)),
)

# Models of any other shape: along `fsdp` alone.
OTHERS = (Rule(".*", largest("fsdp")),)


def parse(rule: str) -> Rule:
  """A rule as people write it: "layers/.*/kernel: stage, fsdp, -".

  Example:
    >>> parse("head/kernel: fsdp, -")
    Rule(pattern='head/kernel', dims=('fsdp', None))
  """
  pattern, _, dims = rule.rpartition(":")
  axes = (dim.strip() for dim in dims.split(","))
  return Rule(pattern.strip(), tuple(None if a == "-" else a for a in axes))
