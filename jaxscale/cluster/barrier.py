"""What the processes of a run decide and share, once JAX knows all of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxscale.cluster import jax_internals

# JAX takes seconds to import; whoever calls these has it.
if TYPE_CHECKING:
  import numpy as np


def is_leader() -> bool:
  """Whether this process writes what the run writes once."""
  import jax

  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Wait until every process is here."""
  if multihost := _multihost_utils():
    multihost.sync_global_devices(name)


def gather(value: Any) -> list[Any]:
  """The values of all processes, in their order, in each; all must call it.

  Args:
    value: anything that JSON has, and small.
  """
  import numpy as np

  if not (multihost := _multihost_utils()):
    return [value]
  text = json.dumps(value).encode()
  longest = int(multihost.process_allgather(np.int32(len(text))).max())
  padded = np.frombuffer(text.ljust(longest), np.uint8)  # JSON ignores spaces
  return [json.loads(row.tobytes()) for row in multihost.process_allgather(padded)]


def any_process(flag: bool) -> bool:
  """Whether the flag is set in any process; all must call this together."""
  import numpy as np

  if not (multihost := _multihost_utils()):
    return flag
  # One collective, where `gather` needs two.
  return bool(multihost.process_allgather(np.array(flag)).any())


def sum_over_processes(values: np.ndarray) -> np.ndarray:
  """Sum of every process's uint64 values, modulo 2^64; all must call it."""
  import numpy as np

  if not (multihost := _multihost_utils()):
    return values
  # As uint32 halves: without x64, JAX would cut uint64 down to them.
  halves = multihost.process_allgather(values.view(np.uint32))
  return np.ascontiguousarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)


def from_leader(value: Any) -> Any:
  """The leader's value, in every process; all must call it.

  What a process has read from a file system may be older than what another has:
  where it decides what is done next, the leader's reading is everybody's.

  Args:
    value: anything that JSON has; lists come back for tuples.
  """
  import numpy as np

  if not (multihost := _multihost_utils()):
    return value
  text = np.frombuffer(json.dumps(value if is_leader() else None).encode(), np.uint8)
  length = int(multihost.broadcast_one_to_all(np.int32(len(text))))
  sent = text if is_leader() else np.zeros(length, np.uint8)
  return json.loads(multihost.broadcast_one_to_all(sent).tobytes())


def on_leader(function: Callable[[], None], name: str) -> None:
  """Run `function` in the leader only, and let the others wait for it.

  Raises:
    OSError: in all of them, if the leader's file system failed.
  """
  failed = None
  if is_leader():
    try:
      function()
    except OSError as e:
      failed = e.errno, e.strerror, str(e.filename)
  barrier(name)
  if failed := from_leader(failed):
    raise OSError(*failed)


@contextlib.contextmanager
def leader_first(name: str, timeout_s: float) -> Iterator[None]:
  """What is inside begins in the leader, and in the others once it has ended there.

  No collective: it may be in a thread, next to other work of the run. Whatever the
  leader does, nobody waits for ever.

  Args:
    name: of this occasion; the same in all processes, and used once.
    timeout_s: after which the others no longer wait.
  """
  client = _coordination_client()
  if client is not None and not is_leader():
    import jax

    with contextlib.suppress(jax.errors.JaxRuntimeError):
      client.blocking_key_value_get(f"jaxscale/{name}", int(1000 * timeout_s))
  try:
    yield
  finally:
    if client is not None and is_leader():
      client.key_value_set(f"jaxscale/{name}", "done")


def _coordination_client() -> Any:
  """JAX's connection to process 0; None where this process is alone.

  Nor where JAX has no name for it: then nobody waits.
  """
  import jax

  if jax.process_count() == 1:
    return None
  return jax_internals.coordination_client()


def _multihost_utils() -> Any:
  """JAX's module of that name; None where this process is alone."""
  import jax

  if jax.process_count() == 1:
    return None
  from jax.experimental import multihost_utils

  return multihost_utils
