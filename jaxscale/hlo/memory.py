"""Memory of a compiled program, and out-of-memory errors of the compiler."""

from __future__ import annotations

from typing import Any, NamedTuple


class Memory(NamedTuple):
  """Bytes per device of a compiled program.

  Attributes:
    arguments: bytes of the arguments (state and batch).
    outputs: bytes of the outputs.
    aliased: bytes of outputs that reuse donated arguments.
    temporaries: bytes of temporaries during execution.
    host: bytes of state and temporaries in host memory, per device.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  host: int = 0

  @property
  def total(self) -> int:
    """Memory that the program needs on each device, in bytes."""
    return self.arguments + self.outputs - self.aliased + self.temporaries


def memory_of(compiled: Any) -> Memory:
  """Return the memory that a compiled program takes on each device.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`.
  """
  m = compiled.memory_analysis()
  device = m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes
  host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
  # Outputs in host memory may alias arguments, as on the device.
  host += m.host_output_size_in_bytes - m.host_alias_size_in_bytes
  return Memory(*device, m.temp_size_in_bytes, host)


def out_of_memory(error: Exception) -> str | None:
  """Return the compiler's message if a program needs too much memory.

  Args:
    error: exception from `compile`.

  Returns:
    The message on one line; None for other errors.

  Example:
    >>> out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: E1000: Ran out of memory"))
    'E1000: Ran out of memory'
  """
  code, found, rest = str(error).split("\n", 1)[0].partition("RESOURCE_EXHAUSTED: ")
  return rest if found and not code else None
