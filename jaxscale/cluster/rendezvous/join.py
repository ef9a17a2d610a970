"""Call of `jax.distributed.initialize` after a successful rendezvous.

The call gets all arguments and leaves nothing to JAX's cluster detection, which mis-parses
node lists, binds one device per task, and gives two steps of a job the same port. JAX's
failures are C++ aborts, so each step that could fail is tried before the call.
"""

from __future__ import annotations

import functools
import math
import shutil
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxscale.cluster.launch import LOOPBACK, Launch
from jaxscale.cluster.rendezvous import network
from jaxscale.cluster.rendezvous.client import ProcessGroup, leave_last
from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.errors import ConfigError

_CONNECT_S = 0.5  # seconds for one connection to the coordinator


def join(
  launch: Launch, group: ProcessGroup | None, timeouts: Timeouts, gpu_ids: Sequence[int] | None
) -> None:
  """Call `jax.distributed.initialize`; all processes of the group call this.

  This turns off JAX's preemption service (jax/_src/distributed.py), which would take SIGTERM
  from jaxscale's handlers and knows no other signal. It also turns off JAX's warning about
  proxies, since connections to the coordinator bypass them.

  Afterwards the death of process 0, which runs JAX's coordinator, aborts the other
  processes in C++ within 0.04–0.3 s. The death of another process aborts them after
  `jax_heartbeat_timeout_s`. The watch must therefore act at once on a closed link; it did
  so in 12 of 12 trials, with the stacks written within 0.13 s.
  `jax_enable_recoverability` stays off: it prevents only the second abort and aborts every
  process that is still busy when process 0 exits (all measured, jax 0.10.2 on CPUs).

  Args:
    launch: the launch of this process.
    group: the result of `rendezvous`; None leaves everything to JAX (TPU pods that know
      their own addresses).
    timeouts: the limits, including JAX's own.
    gpu_ids: the GPUs of this process among the visible ones; None takes all.

  Raises:
    ConfigError: the coordinator cannot be reached from this host.
  """
  import jax

  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_check_proxy_envs", False)
  initialize = functools.partial(
    jax.distributed.initialize,
    local_device_ids=gpu_ids,
    initialization_timeout=math.ceil(timeouts.jax_initialization_timeout_s),
    heartbeat_timeout_seconds=math.ceil(timeouts.jax_heartbeat_timeout_s),
    shutdown_timeout_seconds=math.ceil(timeouts.jax_shutdown_timeout_s),
  )
  if group is None:
    initialize()
    return
  if group.num_processes == 1:
    return
  is_unix = group.coordinator.startswith("unix:")
  if not is_unix:
    address = group.coordinator.rpartition(":")[0].strip("[]")  # of IPv6
    network.bypass_proxies([address, launch.host or address])
  if group.process_id:
    _wait_for_coordinator(group, timeouts.jax_initialization_timeout_s)
  elif group.reserved is not None:
    # JAX's service binds the same port with this option as well, so that no other program
    # can take the port in between.
    group.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  try:
    initialize(
      group.coordinator.replace("[::]", LOOPBACK),
      group.num_processes,
      group.process_id,
      cluster_detection_method="deactivate",
      # Overrides JAX_COORDINATOR_BIND_ADDRESS, which may hold a different address.
      coordinator_bind_address=group.coordinator,
    )
    ports = [link.sock.getpeername()[1] for link in group.links.values()]
    if not is_unix:
      ports.append(int(group.coordinator.rpartition(":")[2]))
    network.endure(ports, 10 * timeouts.heartbeat_timeout_s)
  finally:
    if group.reserved is not None:
      group.reserved.close()
    if is_unix and group.process_id == 0:  # all have connected, so the path is not needed
      folder = Path(group.coordinator.removeprefix("unix:")).parent
      shutil.rmtree(folder, ignore_errors=True)


def _wait_for_coordinator(group: ProcessGroup, timeout_s: float) -> None:
  """Wait until JAX's coordinator listens; JAX itself would abort if it never does.

  This also saves the second that gRPC waits after a first refusal.
  """

  def connect() -> None:
    if group.coordinator.startswith("unix:"):
      with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect(group.coordinator.removeprefix("unix:"))
    address, _, port = group.coordinator.rpartition(":")
    socket.create_connection((address.strip("[]"), int(port)), _CONNECT_S).close()

  try:
    network.retry(connect, timeout_s, pause_s=0.02)
  except OSError as e:
    problem = f"({e}); check for a firewall between the two"
    if isinstance(e, ConnectionRefusedError):
      problem = "(refused); see the output of process 0"
    rank, hosts = group.process_id, group.hosts
    where = f"cannot reach JAX's coordinator on {hosts[0]}, {group.coordinator}"
    problem = f"within {timeout_s:g} s {problem}"
    raise ConfigError(f"process {rank} ({hosts[rank]}): {where}, {problem}") from e


def check_devices(group: ProcessGroup) -> None:
  """Refuse a run whose processes have different numbers of devices.

  JAX starts such runs and fails later, in the first sharded step. Every process sees all
  devices, so all raise the same error without a message. A process that gets the error
  must exit at once; process 0 gets it after the others have left (`leave_last`).

  Args:
    group: the processes of the run.

  Raises:
    ConfigError: the numbers differ; the line has the processes and hosts.
  """
  import jax

  counts = Counter(device.process_index for device in jax.devices())
  usual, _ = Counter(counts.values()).most_common(1)[0]
  odd = {rank: n for rank, n in counts.items() if n != usual}
  if odd:
    leave_last(group)
    ranks = {n: [r for r in odd if odd[r] == n] for n in sorted(set(odd.values()))}
    who = [f"{ranks_with_hosts(r, group.hosts)} with {n}" for n, r in ranks.items()]
    options = "--gpus-per-task=1, or --ntasks-per-node=GPUS"
    fix = f"give each process the same number of devices ({options})"
    raise ConfigError(f"numbers of devices differ: {', '.join(who)}, others with {usual}; {fix}")
