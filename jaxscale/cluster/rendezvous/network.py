"""Host names, addresses and ports for the rendezvous.

This module uses the standard library only. Network problems must be found before the
first use of JAX, whose C++ code waits for minutes and then aborts.
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

from jaxscale.cluster import schedulers
from jaxscale.errors import ConfigError

# These ports are below those that Linux gives to outgoing connections
# (ip_local_port_range is 32768..60999, ip-sysctl.rst of the kernel) and above those of
# registered services.
PORTS = range(20_000, 32_768)
_TCP_RTO_MAX_MS = 44  # include/uapi/linux/tcp.h; Python has no name for it

T = TypeVar("T")


def ports_of(name: str, count: int = 8, among: range = PORTS) -> list[int]:
  """Derive ports from a name, in the order in which they are tried.

  Args:
    name: the name; two different names almost certainly have no port in common.
    count: the number of ports, without repeats.
    among: the range of possible ports.

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
  """Join a host and a port as JAX expects it, with brackets around an IPv6 address.

  Example:
    >>> join_address("n1", 7), join_address("fe80::1%eth0", 7)
    ('n1:7', '[fe80::1%eth0]:7')
  """
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_name() -> str:
  """Return the scheduler's name of this host, or else the host name."""
  return schedulers.ask(lambda s: s.node_name(os.environ)) or socket.gethostname()


def resolve(host: str, patience_s: float = 5.0) -> list[str]:
  """Return the numeric addresses of a host, in the order to try them.

  If the system cannot resolve a node's name, the scheduler is asked for the node's address:
  Slurm's NodeName need not resolve (slurm.conf(5), NodeAddr).

  Args:
    host: the host name.
    patience_s: the seconds to retry, as a name may resolve late (in Kubernetes, once its
      pod is ready).

  Raises:
    ConfigError: neither the system nor the scheduler knows the name.
  """
  deadline = time.monotonic() + patience_s
  while True:
    try:
      infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
      return list(dict.fromkeys(str(entry[4][0]) for entry in infos))
    except (OSError, UnicodeError) as e:  # UnicodeError: a label of > 63 letters
      reason = str(getattr(e, "strerror", None) or e)
    if address := schedulers.ask(lambda s: s.node_address(os.environ, host)):
      with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        return [str(entries[0][4][0])]
    if time.monotonic() >= deadline:
      problem = f"the name of process 0's host does not resolve on {node_name()} ({reason})"
      fix = "fix /etc/hosts or DNS there, or set JAXSCALE_COORDINATOR=ADDRESS:PORT"
      raise ConfigError(f"{host}: {problem}; {fix}")
    time.sleep(min(0.5, patience_s))


def own_address_seen_by(peer: str) -> str:
  """Return this host's address for packets to `peer`, without sending any."""
  family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(address)
    return str(probe.getsockname()[0])


def addresses_to_listen_on(host: str, addresses: Sequence[str]) -> list[str]:
  """Return the addresses on which process 0 listens, as few as are sure to suffice.

  Args:
    host: the name or address by which all processes look for process 0.
    addresses: the addresses of that name on this host.

  Returns:
    Addresses of this host; [] stands for all, because other hosts may resolve the name to
    a different address (several networks, /etc/hosts, a Kubernetes Service).

  Example:
    >>> addresses_to_listen_on("localhost", ["127.0.0.1"])
    ['127.0.0.1']
    >>> addresses_to_listen_on("n1", ["127.0.1.1"])
    []
  """
  is_sure = host == "localhost" or host in addresses
  return list(addresses) if is_sure and all(map(is_own, addresses)) else []


def peer_address(link: Any) -> str:
  """Return the address at the other end of a link; "" if the link is closed."""
  with contextlib.suppress(OSError):
    return plain_address(str(link.sock.getpeername()[0]))
  return ""


def own_address(links: Iterable[Any]) -> list[str]:
  """Return the local address of all links as a list of one; [] if they differ."""
  addresses = {plain_address(str(link.sock.getsockname()[0])) for link in links}
  return list(addresses) if len(addresses) == 1 else []


def is_own(address: str) -> bool:
  """Return whether an address belongs to this host; only such addresses can be bound."""
  with contextlib.suppress(OSError):
    family, endpoint = numeric(address, 0)
    with socket.socket(family) as probe:
      probe.bind(endpoint)
      return True
  return False


def numeric(address: str, port: int) -> tuple[int, Any]:
  """Return an address's family and the tuple for `bind` and `connect`, with its scope.

  Raises:
    OSError: the text is not a numeric address.
  """
  numbers = socket.AI_NUMERICHOST
  infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=numbers)
  return infos[0][0], infos[0][4]


def is_loopback(address: str) -> bool:
  """Return whether an IPv4 or IPv6 address is a loopback address.

  Example:
    >>> [is_loopback(a) for a in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1")]
    [True, True, True, False]
  """
  try:
    parsed = ipaddress.ip_address(address.partition("%")[0])
  except ValueError:  # a process has sent an invalid address
    return False
  return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def plain_address(address: str) -> str:
  """Convert an IPv4-mapped IPv6 address, as dual-stack sockets show it, to IPv4.

  Example:
    >>> plain_address("::ffff:10.0.0.1"), plain_address("fe80::1%eth0")
    ('10.0.0.1', 'fe80::1%eth0')
  """
  return re.sub(r"(?i)^::ffff:(?=\d+\.)", "", address)


def gloo_address() -> str | None:
  """Return the address where gloo (JAX's collectives on CPUs) will listen.

  It is the first address of the host's own name that can be bound. JAX passes neither host
  nor interface (jax/_src/xla_bridge.py, make_cpu_client), so gloo uses gethostname()
  (gloo/transport/tcp/device.cc, lookupAddrForHostname). None means that the name does not resolve,
  and gloo could not start.
  """
  with contextlib.suppress(OSError):
    own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    for family, kind, _, _, address in own:
      with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
        probe.bind(address)
        return str(address[0])
  return None


def namespace(kind: str) -> str:
  """Return an identifier of this machine and a namespace of it (namespaces(7)).

  Containers on one machine may have different namespaces. The boot_id (random(4))
  identifies the machine.

  Args:
    kind: "net" for processes that reach each other over loopback; "mnt" for processes
      that see the same files.
  """
  try:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"
  except OSError:
    return socket.gethostname()


def bind_port(
  ports: Iterable[int], addresses: Sequence[str], listen: bool
) -> tuple[int, list[socket.socket]]:
  """Bind the first free port on each address; return the port and the sockets.

  The sockets have no SO_REUSEPORT, which JAX's coordinator sets. With it, the coordinators
  of two steps of a job could share a port, and each would get connections meant for the
  other.

  Args:
    ports: the ports in the order to try them.
    addresses: addresses of this host; [] binds all of them by one socket.
    listen: whether the sockets listen. If False, they only reserve the port: no other
      program can bind it, and early connections are refused at once. Close them just
      before the port is used.

  Raises:
    OSError: all ports are taken.
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
  """Return a socket bound to an address; "::" also accepts IPv4."""
  family, endpoint = numeric(address, port)
  sock = socket.socket(family)
  try:
    if family == socket.AF_INET6:
      sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
    # With SO_REUSEADDR, old connections in TIME_WAIT do not block the port, but a
    # listening socket does (socket(7)).
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, listen)
    sock.bind(endpoint)
    if listen:
      sock.listen(4096)
    return sock
  except OSError:
    sock.close()
    raise


def describe_taken(ports: Sequence[int]) -> str:
  """Describe ports that other programs use, with the user IDs that Linux reports.

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
  """Call a function until it raises no OSError or the time is up; return its result."""
  deadline = time.monotonic() + patience_s
  while True:
    try:
      return function()
    except OSError:
      if time.monotonic() >= deadline:
        raise
    time.sleep(pause_s)


def tune(sock: socket.socket) -> None:
  """Send messages without delay, and let the kernel detect a host that is gone.

  After 30 s of silence the kernel probes 3 times, 10 s apart (tcp(7)), which makes one
  minute instead of the default of two hours.
  """
  sock.settimeout(None)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def endure(ports: Collection[int], seconds: float) -> None:
  """Keep this process's connections through network failures of limited length.

  gRPC, and so JAX's coordinator, closes a connection after 20 s. This may come before TCP
  retries after a failure of 13 s. Linux 6.15 retries every second; older kernels double
  the pause and retry after 26 s.

  Args:
    ports: the ports, at either end, of the connections to keep.
    seconds: the seconds until the kernel closes a connection; the watch decides earlier.
  """
  tcp = socket.IPPROTO_TCP
  for name in os.listdir("/proc/self/fd"):
    with (
      # The descriptor may be no internet socket, or the kernel may be older.
      contextlib.suppress(OSError, IndexError),
      socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as sock,
    ):
      if {sock.getsockname()[1], sock.getpeername()[1]} & {*ports}:
        sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
        sock.setsockopt(tcp, _TCP_RTO_MAX_MS, 1000)


def bypass_proxies(hosts: Iterable[str], env: MutableMapping = os.environ) -> None:
  """Let gRPC, and so JAX, reach these hosts without a proxy.

  gRPC uses $grpc_proxy, $https_proxy or $http_proxy unless an entry of $no_grpc_proxy, or
  of $no_proxy if that is not set, is a suffix of the host name
  (grpc/doc/environment_variables.md); "*" does not count. So the hosts are added to both
  variables: to $no_grpc_proxy if it is set, and to $no_proxy, which other libraries read.
  """
  for name in ["no_proxy"] + ["no_grpc_proxy"] * ("no_grpc_proxy" in env):
    entries = [e.strip() for e in env.get(name, "").split(",") if e.strip()]
    env[name] = ",".join(dict.fromkeys([*entries, *hosts]))
