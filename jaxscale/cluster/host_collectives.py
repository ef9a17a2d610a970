"""Values that the processes of a run decide together, after JAX has joined them.

They go over sealed links to process 0 (`group`), not over JAX's collectives: whoever speaks
the protocol of Gloo could read and change them. Without links, because the program has
called `jax.distributed.initialize` itself, collectives are used, and a line reports it.
"""

import contextlib
import functools
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxscale.cluster import group as groups
from jaxscale.cluster import jax_internals
from jaxscale.files import parse_json


def is_leader() -> bool:
  """Return whether this is process 0, which writes the files of the run."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Wait until every process has called `barrier` with this name.

  Computations that run on the devices are not waited for.
  """
  if jax.process_count() > 1:
    _agree(f"barrier {name}", None, lambda values: None)


def gather(value: Any) -> list[Any]:
  """Return the values of all processes, by rank; all processes must call this.

  Args:
    value: a small JSON value.
  """
  if jax.process_count() == 1:
    return [value]
  texts, number = _agree("gather", value, _distinct)
  return [parse_json(texts[i]) for i in number]


def _distinct(values: Sequence[Any]) -> tuple[list[str], list[int]]:
  """Return the different values as JSON, and the number of each process's value.

  In most calls thousands of processes have equal values, which are sent to each process.
  """
  texts = [json.dumps(value) for value in values]
  numbers = {text: i for i, text in enumerate(dict.fromkeys(texts))}
  return [*numbers], [numbers[text] for text in texts]


@functools.cache
def share_of_cores() -> int:
  """Return this process's share of the CPU cores that it may run on, at least 1.

  Processes of one host divide the cores if their affinity masks overlap, as without a binding
  by the launcher. All processes must call this; later calls return the same number.
  """
  own = [socket.gethostname(), sorted(os.sched_getaffinity(0))]
  if jax.process_count() == 1:
    return len(own[1])
  return _agree("share of cores", own, _shares)[jax.process_index()]


def _shares(values: Sequence[Any]) -> list[int]:
  """Return the share of the cores of each process, from its host and its cores."""
  masks: dict[str, list[set[int]]] = {}
  for host, cores in values:
    masks.setdefault(host, []).append(set(cores))
  overlapping = [sum(not m.isdisjoint(cores) for m in masks[host]) for host, cores in values]
  return [max(len(own[1]) // n, 1) for own, n in zip(values, overlapping, strict=True)]


def any_process(flag: bool) -> bool:
  """Return whether the flag is set in any process; all processes must call this."""
  return flag if jax.process_count() == 1 else _agree("any process", flag, any)


def sum_over_processes(values: np.ndarray) -> np.ndarray:
  """Sum the uint64 values of all processes, modulo 2^64; all processes must call this."""
  if jax.process_count() == 1:
    return values
  total = _agree("sum", values.tobytes().hex(), _sum)
  return np.frombuffer(bytes.fromhex(total), np.uint64).reshape(values.shape)


def _sum(texts: Sequence[str]) -> str:
  rows = np.stack([np.frombuffer(bytes.fromhex(text), np.uint64) for text in texts])
  return rows.sum(axis=0, dtype=np.uint64).tobytes().hex()


def from_leader(value: Any) -> Any:
  """Return process 0's value in every process; all processes must call this.

  File systems may show processes different versions of a file. A value that decides what
  happens next must therefore come from process 0.

  Args:
    value: a JSON value; tuples come back as lists.
  """
  if jax.process_count() == 1:
    return value
  return _agree("from leader", value if is_leader() else None, _first)


def _first(values: Sequence[Any]) -> Any:
  return values[0]


def _agree(step: str, value: Any, combine: Callable[[Sequence[Any]], Any]) -> Any:
  """Return what `combine` makes of the values of all processes, equal in all of them.

  Args:
    step: the step, which must be equal in all processes.
    value: the JSON value of this process.
    combine: a function of the values by rank.
  """
  if (group := groups.connected()) is None:
    _report_open_links()
    return combine(gather_openly(value))
  value = parse_json(json.dumps(value))  # process 0 gets lists for tuples, as the others do
  values = groups.gather(group, step, value)
  result = combine(values) if values else None
  return parse_json(json.dumps(groups.broadcast(group, step, result)))


def gather_openly(value: Any) -> list[Any]:
  """Return the values of all processes, by rank, over JAX's collectives.

  Raises:
    PeerError: what arrived is not from a process of this run.
  """
  text = json.dumps(value).encode()
  longest = int(multihost_utils.process_allgather(np.int32(len(text))).max())
  try:
    if not len(text) <= longest <= groups.MAX_VALUE:
      raise ValueError(f"{longest} bytes")
    padded = np.frombuffer(text.ljust(longest), np.uint8)  # JSON ignores spaces
    return [parse_json(row.tobytes()) for row in multihost_utils.process_allgather(padded)]
  except ValueError as e:
    raise groups.invalid_value(e) from None


@functools.cache
def _report_open_links() -> None:
  if is_leader():
    line = "JAX's open connections carry what the processes decide together; for sealed links "
    line += "call jaxscale.cluster.initialize in place of jax.distributed.initialize"
    print(f"warning: {line}", file=sys.stderr, flush=True)


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
  if jax.process_count() > 1:
    failed = _agree(f"on leader {name}", failed, _first)
  if failed:
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
