"""JAX's own initialization, once our rendezvous has shown that it will succeed.

`jax.distributed.initialize` with everything given: nothing of it is left to JAX's
detection of clusters, which mis-parses node lists, binds one device per task, and
gives two steps of a job one port. Its failures are C++ aborts, so what could fail
is tried before it is called.
"""

from __future__ import annotations

import functools
import math
import shutil
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxscale.cluster.detect.launch import LOOPBACK, Launch
from jaxscale.cluster.rendezvous import network
from jaxscale.cluster.rendezvous.client import ProcessGroup, leave_last
from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.errors import ConfigError

_DEFAULTS = Timeouts()
_CONNECT_S = 0.5  # seconds for one connection to the coordinator


def join(
  launch: Launch,
  group: ProcessGroup | None,
  timeouts: Timeouts = _DEFAULTS,
  *,
  local_device_ids: Sequence[int] | None = None,
) -> None:
  """Join the others in JAX; all processes of the group call this.

  JAX's preemption service is off afterwards: it would take SIGTERM away from our
  own handlers, and knows no other signal. So is its warning about proxies: the
  coordinator has been excepted from them.

  After this the death of process 0, where JAX's coordinator is, aborts the others
  in C++ within 0.04–0.3 s; that of another process, after `jax_heartbeat_timeout_s`.
  So whoever watches the links has to act on a closed one at once: it can, 12 of 12
  times, with the stacks written within 0.13 s. `jax_enable_recoverability` stays
  off: it spares the others only the second abort, and in its place aborts whoever
  is still at work when process 0 is done (all measured, jax 0.10.2 on CPUs).

  Args:
    group: what `rendezvous` returned; None leaves all to JAX (TPU pods that know
      their own addresses).
    timeouts: JAX's own are among them.
    local_device_ids: the GPUs of this process among those that are visible; None
      takes all of them.

  Raises:
    ConfigError: the coordinator cannot be reached from here.
  """
  import jax

  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_check_proxy_envs", False)
  initialize = functools.partial(
    jax.distributed.initialize,
    local_device_ids=local_device_ids,
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
    # JAX's service takes the port over, and gRPC binds with this option as well: so
    # the port is never free for anybody else in between.
    group.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  try:
    initialize(
      group.coordinator.replace("[::]", LOOPBACK),
      group.num_processes,
      group.process_id,
      cluster_detection_method="deactivate",
      # Else JAX_COORDINATOR_BIND_ADDRESS would name another place than we do.
      coordinator_bind_address=group.coordinator,
    )
    ports = [link.sock.getpeername()[1] for link in group.links.values()]
    if not is_unix:
      ports.append(int(group.coordinator.rpartition(":")[2]))
    network.endure(ports, 10 * timeouts.heartbeat_timeout_s)
  finally:
    if group.reserved is not None:
      group.reserved.close()
    if is_unix and group.process_id == 0:  # all are connected, nobody needs its name
      folder = Path(group.coordinator.removeprefix("unix:")).parent
      shutil.rmtree(folder, ignore_errors=True)


def _wait_for_coordinator(group: ProcessGroup, timeout_s: float) -> None:
  """Wait until JAX's coordinator listens: JAX itself would abort where it never does.

  It also saves a second: gRPC waits that long after a first refusal.
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
    why = f"{e}; is there a firewall between the two?"
    if isinstance(e, ConnectionRefusedError):
      why = "refused; see the last lines of process 0"
    rank, hosts = group.process_id, group.hosts
    where = f"JAX's coordinator on {hosts[0]}, {group.coordinator}"
    why = f"not reached for {timeout_s:g} s ({why})"
    raise ConfigError(f"process {rank} ({hosts[rank]}): {where}, {why}") from e


def check_devices(group: ProcessGroup) -> None:
  """Refuse processes with different numbers of devices, in all of them alike.

  JAX starts such runs, and fails later, in the first step that is sharded. Every
  process sees all devices: nothing has to be sent. Whoever gets the error is to
  leave at once; process 0 gets it when the others have left, `leave_last`.

  Raises:
    ConfigError: it names the processes and hosts that differ.
  """
  import jax

  counts = Counter(device.process_index for device in jax.devices())
  usual, _ = Counter(counts.values()).most_common(1)[0]
  odd = {rank: n for rank, n in counts.items() if n != usual}
  if odd:
    leave_last(group)
    ranks = {n: [r for r in odd if odd[r] == n] for n in sorted(set(odd.values()))}
    who = [f"{ranks_with_hosts(r, group.hosts)}: {n} devices" for n, r in ranks.items()]
    fix = "give each process as many (--gpus-per-task=1, or --ntasks-per-node as there are GPUs)"
    raise ConfigError(f"{'; '.join(who)}, the others: {usual}; {fix}")
