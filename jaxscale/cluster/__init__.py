"""Where this process runs among others, and how they agree.

`initialize` joins the processes of one run, however they were started: by srun or
mpirun, in pods, or by any launcher that sets the JAXSCALE_* variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxscale.settings import ConfigError

# JAX takes seconds to import, and the processes meet before it is asked anything.
if TYPE_CHECKING:
  import numpy as np

  from jaxscale.cluster.rendezvous import Meeting

_meeting: Meeting | None = None  # that this process came from, if it is one of several
_has_joined = False  # whether JAX knows of others


def initialize(config: object = None, *, timeout_s: float = 120.0) -> None:
  """Join the other processes of this run, if there are any.

  `detect` finds out who they are, from JAXSCALE_* variables or from the launcher's;
  all meet and compare what they run (`meet`); then JAX is told everything it would
  have to guess (`join`). Call it before anything asks JAX for devices.

  Args:
    config: what all processes have to be given alike; its `repr` is compared.
    timeout_s: seconds to wait until all processes have come.

  Raises:
    ConfigError: the variables contradict each other, a process has not come or runs
      something else, a GPU is missing, …: one line, in all processes that can be told.
  """
  global _meeting, _has_joined
  from jaxscale.cluster.detect import detect
  from jaxscale.cluster.introduction import digests_of
  from jaxscale.cluster.join import check_devices, join
  from jaxscale.cluster.local_devices import local_device_ids, visible_gpus
  from jaxscale.cluster.rendezvous import meet

  launch = detect(os.environ)
  if launch.note and launch.process_id == 0:
    print(launch.note, flush=True)
  if launch.num_processes == 1:
    return
  if launch.num_processes == 0:  # a TPU pod that only JAX knows
    join(launch, None)
    _has_joined = True
    return
  num_gpus, ids, trouble = visible_gpus(os.environ), None, ""
  try:
    ids = local_device_ids(os.environ, num_gpus, launch)
  except ConfigError as e:
    trouble = str(e)  # it may be this host's alone: all are to hear of it
  _meeting = meet(
    launch,
    timeout_s=timeout_s,
    digests=digests_of(config),
    on_cpu=not num_gpus,
    trouble=trouble,
  )
  join(launch, _meeting, local_device_ids=ids)
  _has_joined = True
  check_devices(_meeting)


def leave_last() -> bool:
  """Let the others end first if this is process 0; whether there are others.

  JAX's coordinator ends with process 0, and aborts whoever is still there.
  """
  if _meeting is not None:
    from jaxscale.cluster.rendezvous import leave_last

    leave_last(_meeting)
  return _has_joined


def is_leader() -> bool:
  """Whether this process writes what the run writes once."""
  import jax

  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Wait until every process is here."""
  import jax

  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
  """Whether the flag is set in any process; all must call this together."""
  import jax
  import numpy as np

  if jax.process_count() == 1:
    return flag
  from jax.experimental import multihost_utils

  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def sum_over_processes(values: np.ndarray) -> np.ndarray:
  """Sum of every process's uint64 values, modulo 2^64; all must call it."""
  import jax
  import numpy as np

  if jax.process_count() == 1:
    return values
  from jax.experimental import multihost_utils

  # As uint32 halves: without x64, JAX would cut uint64 down to them.
  halves = multihost_utils.process_allgather(values.view(np.uint32))
  return np.ascontiguousarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)


def from_leader(value: Any) -> Any:
  """The leader's value, in every process; all must call it.

  What a process has read from a file system may be older than what another has:
  where it decides what is done next, the leader's reading is everybody's.

  Args:
    value: anything that JSON has; lists come back for tuples.
  """
  import jax
  import numpy as np

  if jax.process_count() == 1:
    return value
  from jax.experimental.multihost_utils import broadcast_one_to_all

  text = np.frombuffer(json.dumps(value if is_leader() else None).encode(), np.uint8)
  length = int(broadcast_one_to_all(np.int32(len(text))))
  sent = text if is_leader() else np.zeros(length, np.uint8)
  return json.loads(broadcast_one_to_all(sent).tobytes())


def gather(value: Any) -> list[Any]:
  """The values of all processes, in their order, in each; all must call it.

  Args:
    value: anything that JSON has, and small.
  """
  import jax
  import numpy as np

  if jax.process_count() == 1:
    return [value]
  from jax.experimental.multihost_utils import process_allgather

  text = json.dumps(value).encode()
  longest = int(process_allgather(np.int32(len(text))).max())
  padded = np.frombuffer(text.ljust(longest), np.uint8)  # JSON minds no spaces
  return [json.loads(row.tobytes()) for row in process_allgather(padded)]


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
