"""The memory of a compiled program, and errors of a compiler that has too little."""

from __future__ import annotations

from typing import Any, NamedTuple


class Memory(NamedTuple):
  """Bytes per device of a compiled program.

  Attributes:
    arguments: state and batch.
    outputs: what is given back.
    aliased: of those, what takes the place of donated arguments.
    temporaries: all else, while it runs.
    host: in the host's memory, of state and temporaries, a device.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  host: int = 0

  @property
  def total(self) -> int:
    """What the device must have."""
    return self.arguments + self.outputs - self.aliased + self.temporaries


def memory_of(compiled: Any) -> Memory:
  """Bytes that a compiled program takes on each device.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`.
  """
  m = compiled.memory_analysis()
  device = m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes
  host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
  # Outputs on the host take the place of arguments there, as on the device.
  host += m.host_output_size_in_bytes - m.host_alias_size_in_bytes
  return Memory(*device, m.temp_size_in_bytes, host)


def out_of_memory(error: Exception) -> str | None:
  """The compiler's line, where the memory is too small for a program.

  Args:
    error: of `compile`.

  Returns:
    One line; None: it is something else.

  Example:
    >>> out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: E1000: Ran out of memory"))
    'E1000: Ran out of memory'
  """
  code, found, rest = str(error).split("\n", 1)[0].partition("RESOURCE_EXHAUSTED: ")
  return rest if found and not code else None
