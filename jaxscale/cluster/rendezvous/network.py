"""Names, addresses and ports, before anybody is asked to use them.

Standard library only, and nothing of JAX: what is wrong with a network has to be
known before JAX's C++ is asked, which waits for minutes and then aborts.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxscale.cluster.detect.slurm import node_address
from jaxscale.errors import ConfigError

# Below the ports that Linux gives to outgoing connections (ip_local_port_range is
# 32768..60999, ip-sysctl.rst of the kernel), above those of registered services.
PORTS = range(20_000, 32_768)
_TCP_RTO_MAX_MS = 44  # include/uapi/linux/tcp.h; Python has no name for it

T = TypeVar("T")


def ports_of(name: str, count: int = 8, among: range = PORTS) -> list[int]:
  """Ports that everybody who knows the name derives alike, in this order.

  Args:
    name: two names have, in all likelihood, no port in common.
    count: how many, without repeats.

  Example:
    >>> ports_of("slurm-123.0", 2) == ports_of("slurm-123.0", 2)
    True
    >>> set(ports_of("slurm-123.0")) & set(ports_of("slurm-123.1"))
    set()
  """
  digests = (hashlib.sha256(f"{name}/{i}".encode()) for i in range(64 * count))
  numbers = (int.from_bytes(digest.digest()[:8]) for digest in digests)
  return list(dict.fromkeys(among[n % len(among)] for n in numbers))[:count]


def join_address(host: str, port: int) -> str:
  """host:port as JAX takes it, IPv6 in brackets.

  Example:
    >>> join_address("n1", 7), join_address("fe80::1%eth0", 7)
    ('n1:7', '[fe80::1%eth0]:7')
  """
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_name() -> str:
  """What this host is called where its user looks: Slurm's name, or its own."""
  return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def resolve(host: str, patience_s: float = 5.0) -> list[str]:
  """The numeric addresses of a host, those to try first in front.

  Where the system does not know a name that Slurm has for a node, Slurm is asked
  for its address: NodeName need not resolve (slurm.conf(5), NodeAddr).

  Args:
    patience_s: a name may become known late (Kubernetes: when its pod is ready).

  Raises:
    ConfigError: nobody knows the name.
  """
  deadline = time.monotonic() + patience_s
  while True:
    try:
      found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
      return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    except (OSError, UnicodeError) as e:  # UnicodeError: a label of > 63 letters
      reason = str(getattr(e, "strerror", None) or e)
    if "SLURM_JOB_ID" in os.environ and (address := node_address(host)):
      with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        return [str(entries[0][4][0])]
    if time.monotonic() >= deadline:
      why = f"the name of process 0's host does not resolve on {node_name()} ({reason})"
      fix = "fix /etc/hosts or DNS there, or set JAXSCALE_COORDINATOR=ADDRESS:PORT"
      raise ConfigError(f"{host}: {why}; {fix}")
    time.sleep(min(0.5, patience_s))


def own_address_seen_by(peer: str) -> str:
  """The address of this host from which packets to `peer` leave; sends none."""
  family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(address)
    return str(probe.getsockname()[0])


def addresses_to_listen_on(host: str, addresses: Sequence[str]) -> list[str]:
  """Where process 0 listens: no further than is sure to be enough.

  Args:
    host: by which all look for it.
    addresses: what that is on this host.

  Returns:
    Addresses of this host; [] for all: elsewhere a name may stand for another address
    of it than here (several networks, /etc/hosts, a Service of Kubernetes).

  Example:
    >>> addresses_to_listen_on("localhost", ["127.0.0.1"])
    ['127.0.0.1']
    >>> addresses_to_listen_on("n1", ["127.0.1.1"])
    []
  """
  is_sure = host == "localhost" or host in addresses
  return list(addresses) if is_sure and all(map(is_own, addresses)) else []


def peer_address(link: Any) -> str:
  """The address at the other end of a link; "" where that is gone."""
  with contextlib.suppress(OSError):
    return plain_address(str(link.sock.getpeername()[0]))
  return ""


def own_address(links: Iterable[Any]) -> list[str]:
  """The one address of this host at which all links end; [] where they differ."""
  found = {plain_address(str(link.sock.getsockname()[0])) for link in links}
  return list(found) if len(found) == 1 else []


def is_own(address: str) -> bool:
  """Whether it is an address of this host: others cannot be bound."""
  with contextlib.suppress(OSError):
    family, place = numeric(address, 0)
    with socket.socket(family) as probe:
      probe.bind(place)
      return True
  return False


def numeric(address: str, port: int) -> tuple[int, Any]:
  """The family of an address, and what `bind` and `connect` take, with its scope.

  Raises:
    OSError: it is none.
  """
  numbers = socket.AI_NUMERICHOST
  found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=numbers)
  return found[0][0], found[0][4]


def is_loopback(address: str) -> bool:
  """Whether only this host can reach the address, also when written as IPv6.

  Example:
    >>> [is_loopback(a) for a in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1")]
    [True, True, True, False]
  """
  try:
    parsed = ipaddress.ip_address(address.partition("%")[0])
  except ValueError:  # a process says what is no address
    return False
  return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def plain_address(address: str) -> str:
  """An IPv4 address that a dual-stack socket shows as IPv6, as IPv4 again.

  Example:
    >>> plain_address("::ffff:10.0.0.1"), plain_address("fe80::1%eth0")
    ('10.0.0.1', 'fe80::1%eth0')
  """
  return re.sub(r"(?i)^::ffff:(?=\d+\.)", "", address)


def gloo_address() -> str | None:
  """Where gloo (JAX's collectives on CPUs) will listen in this process.

  The first address of the host's own name that can be bound: JAX names neither
  host nor interface (jax/_src/xla_bridge.py, make_cpu_client), and then gloo goes
  by gethostname() (gloo/transport/tcp/device.cc, lookupAddrForHostname). None
  where the name does not resolve, and gloo could not start.
  """
  with contextlib.suppress(OSError):
    own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    for family, kind, _, _, address in own:
      with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
        probe.bind(address)
        return str(address[0])
  return None


def namespace(kind: str) -> str:
  """The same in two processes of one machine and one namespace (namespaces(7)).

  Containers on one machine may well be in different ones; the machine is known by
  its boot (random(4), boot_id).

  Args:
    kind: "net": they reach each other over loopback; "mnt": they see the same files.
  """
  try:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"
  except OSError:
    return socket.gethostname()


def bind_port(
  ports: Iterable[int], addresses: Sequence[str], listen: bool
) -> tuple[int, list[socket.socket]]:
  """The first of the ports that is free, and a socket for each address bound to it.

  Without SO_REUSEPORT, which JAX's coordinator sets: two of those on one port, of
  two steps of a job, share it, and each gets connections meant for the other.

  Args:
    ports: to try, in this order.
    addresses: of this host; [] for all that it has, by one socket.
    listen: False: the sockets only keep the port. Nobody else can bind it, and
      whoever connects too early is refused at once. Close them just before the port
      is used.

  Raises:
    OSError: all are taken.
  """
  error = OSError("no port was given")
  everywhere = ["::" if socket.has_dualstack_ipv6() else "0.0.0.0"]
  for port in ports:
    sockets: list[socket.socket] = []
    try:
      for address in addresses or everywhere:
        sockets.append(_bound(address, port, listen))
      return port, sockets
    except OSError as e:
      error = e
      for sock in sockets:
        sock.close()
  raise error


def _bound(address: str, port: int, listen: bool) -> socket.socket:
  """A socket on an address; "::" is IPv4's too."""
  family, place = numeric(address, port)
  sock = socket.socket(family)
  try:
    if family == socket.AF_INET6:
      sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
    # Connections of an earlier run that have not died down yet are not an obstacle; a
    # socket that listens is (SO_REUSEADDR in socket(7)).
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, listen)
    sock.bind(place)
    if listen:
      sock.listen(4096)
    return sock
  except OSError:
    sock.close()
    raise


def describe_taken(ports: Sequence[int]) -> str:
  """Ports of this host that other programs use, and whose these are where Linux says.

  Example:
    >>> describe_taken([1])
    '1'
  """
  users: dict[int, str] = {}
  for table in ("tcp", "tcp6"):
    with contextlib.suppress(OSError):
      for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        _, local, _, state, _, _, _, user, *_ = line.split()  # proc_pid_net(5)
        if state == "0A":  # it listens
          users[int(local.rpartition(":")[2], 16)] = f" (uid {user})"
  return ", ".join(f"{port}{users.get(port, '')}" for port in ports)


def retry(function: Callable[[], T], patience_s: float, pause_s: float) -> T:
  """What `function` returns, called again until it raises no OSError, or too long."""
  deadline = time.monotonic() + patience_s
  while True:
    try:
      return function()
    except OSError:
      if time.monotonic() >= deadline:
        raise
    time.sleep(pause_s)


def tune(sock: socket.socket) -> None:
  """Messages leave at once, and a host that is gone is noticed by the kernel.

  After 30 s of silence it asks 3 times, 10 s apart (tcp(7)): a minute in all,
  where the default is two hours.
  """
  sock.settimeout(None)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def endure(ports: Collection[int], seconds: float) -> None:
  """Keep connections of this process that are cut off for less than so many seconds.

  gRPC, and so JAX's coordinator, gives a connection up after 20 s, which may be before
  TCP tries again after a cut of 13 s. What is not acknowledged is sent again each
  second where the kernel can (Linux 6.15); others double the pause, and try after 26 s.

  Args:
    ports: of connections that are meant, at either end.
    seconds: until the kernel gives up; whoever watches has decided before.
  """
  tcp = socket.IPPROTO_TCP
  for name in os.listdir("/proc/self/fd"):
    with (
      # No socket, none of the internet, or an older kernel.
      contextlib.suppress(OSError, IndexError),
      socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as sock,
    ):
      if {sock.getsockname()[1], sock.getpeername()[1]} & {*ports}:
        sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
        sock.setsockopt(tcp, _TCP_RTO_MAX_MS, 1000)


def bypass_proxies(hosts: Iterable[str], env: MutableMapping = os.environ) -> None:
  """Let gRPC, and with it JAX, reach these hosts without a proxy.

  gRPC sends a connection through $grpc_proxy, $https_proxy or $http_proxy unless
  $no_grpc_proxy, or where that is not set $no_proxy, has an entry the host's name
  ends with (grpc/doc/environment_variables.md); "*" is no such entry. So the
  hosts are added to whichever counts, and to the one that other libraries read.
  """
  for name in ["no_proxy"] + ["no_grpc_proxy"] * ("no_grpc_proxy" in env):
    entries = [e.strip() for e in env.get(name, "").split(",") if e.strip()]
    env[name] = ",".join(dict.fromkeys([*entries, *hosts]))
