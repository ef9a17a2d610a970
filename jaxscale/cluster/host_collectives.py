"""Collectives of host values between the processes of a run, after JAX has joined them."""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxscale.cluster import jax_internals


def is_leader() -> bool:
  """Return whether this is process 0, which writes the files of the run."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Wait until every process has called `barrier` with this name."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def gather(value: Any) -> list[Any]:
  """Return the values of all processes, by rank; all processes must call this.

  Args:
    value: a small JSON value.
  """
  if jax.process_count() == 1:
    return [value]
  text = json.dumps(value).encode()
  longest = int(multihost_utils.process_allgather(np.int32(len(text))).max())
  padded = np.frombuffer(text.ljust(longest), np.uint8)  # JSON ignores spaces
  return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]


@functools.cache
def share_of_cores() -> int:
  """Return this process's share of the CPU cores that it may run on, at least 1.

  Processes of one host divide the cores if their affinity masks overlap, as without a binding
  by the launcher. All processes must call this; later calls return the same number.
  """
  host, cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
  masks = [set(theirs) for other, theirs in gather([host, cores]) if other == host]
  return max(len(cores) // sum(not mask.isdisjoint(cores) for mask in masks), 1)


def any_process(flag: bool) -> bool:
  """Return whether the flag is set in any process; all processes must call this."""
  if jax.process_count() == 1:
    return flag
  # One collective, where `gather` needs two.
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def sum_over_processes(values: np.ndarray) -> np.ndarray:
  """Sum the uint64 values of all processes, modulo 2^64; all processes must call this."""
  if jax.process_count() == 1:
    return values
  # Without x64, JAX would truncate uint64 to uint32, so the halves are sent.
  halves = multihost_utils.process_allgather(values.view(np.uint32))
  return np.ascontiguousarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)


def from_leader(value: Any) -> Any:
  """Return process 0's value in every process; all processes must call this.

  File systems may show processes different versions of a file. A value that decides what
  happens next must therefore come from process 0.

  Args:
    value: a JSON value; tuples come back as lists.
  """
  if jax.process_count() == 1:
    return value
  text = np.frombuffer(json.dumps(value if is_leader() else None).encode(), np.uint8)
  length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  sent = text if is_leader() else np.zeros(length, np.uint8)
  return json.loads(multihost_utils.broadcast_one_to_all(sent).tobytes())


def on_leader(function: Callable[[], None], name: str) -> None:
  """Run a function in process 0 only, while the others wait for it.

  Args:
    function: the function.
    name: a name of this call, equal in all processes.

  Raises:
    OSError: the function raised an OSError; all processes raise it.
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
  """Run the body in process 0 first; the others begin it when process 0 has finished.

  This is not a collective, so it may run in a thread next to other work of the run.

  Args:
    name: a name of this call, equal in all processes and used once.
    timeout_s: the seconds after which the others no longer wait.
  """
  client = jax_internals.coordination_client() if jax.process_count() > 1 else None
  if client is not None and not is_leader():
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      client.blocking_key_value_get(f"jaxscale/{name}", int(1000 * timeout_s))
  try:
    yield
  finally:
    if client is not None and is_leader():
      client.key_value_set(f"jaxscale/{name}", "done")
