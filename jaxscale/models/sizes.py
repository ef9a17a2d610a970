"""Checks of the sizes of models, for settings and for functions. Imports no JAX."""

from __future__ import annotations

from jaxscale.errors import invalid


def check_heads(owner: str, width: int, num_heads: int) -> None:
  """Raise if heads do not divide a width.

  Args:
    owner: the model, for the error.
    width: the width of the residual stream.
    num_heads: the number of heads.

  Raises:
    ConfigError: the heads do not divide the width.
  """
  if width % num_heads:
    problem = f"does not divide width={width}"
    raise invalid(f"{owner}.num_heads", num_heads, problem, "give a divisor")


def transformer_heads(
  width: int, num_heads: int, num_kv_heads: int | None, head_width: int | None
) -> tuple[int, int]:
  """Return a Transformer's number of heads of keys and values, and the width of a head.

  Args:
    width: the width of the residual stream.
    num_heads: the number of query heads.
    num_kv_heads: the number of heads of keys and values; None means `num_heads`.
    head_width: the width of a head; None means width / num_heads.

  Raises:
    ConfigError: the heads do not fit, or have an odd width.
  """
  groups = num_heads if num_kv_heads is None else num_kv_heads
  if head_width is None:
    check_heads("Transformer", width, num_heads)
  if num_heads % groups:
    problem = f"does not divide num_heads={num_heads}"
    raise invalid("Transformer.num_kv_heads", groups, problem, "give a divisor")
  each = width // num_heads if head_width is None else head_width
  if each % 2:
    field, value = ("num_heads", num_heads) if head_width is None else ("head_width", head_width)
    problem = f"gives heads of odd width {each}, which RoPE cannot rotate"
    raise invalid(f"Transformer.{field}", value, problem, "choose an even width")
  return groups, each
