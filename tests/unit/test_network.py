"""Names, addresses, ports and proxies, as the kernel and the resolver have them."""

import errno
import socket
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest

from jaxscale.cluster.rendezvous import network
from jaxscale.errors import ConfigError
from support.errors import config_error


def test_ports_follow_from_the_name_and_differ_between_steps():
  names = [f"slurm-{job}.{step}" for job in range(50) for step in range(20)]
  first = [network.ports_of(name, 1)[0] for name in names]
  # 1,000 names on 12,768 ports: 37 pairs collide by chance (birthday), not all names.
  assert len(set(first)) > 930
  for name in names[:50]:
    ports = network.ports_of(name)
    assert len(set(ports)) == 8 and set(ports) <= set(network.PORTS)
    assert ports[:3] == network.ports_of(name, 3)
  assert sorted(network.ports_of("few", 8, range(100, 103))) == [100, 101, 102]
  # They are none that Linux gives away.
  low = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
  assert network.PORTS.stop <= max(int(low), 32_768)


def test_a_name_resolves_or_is_reported_not_to(monkeypatch):
  assert "127.0.0.1" in network.resolve("localhost")
  monkeypatch.setenv("SLURMD_NODENAME", "n7")
  monkeypatch.delenv("SLURM_JOB_ID", raising=False)
  for name in ("no-such-host.invalid", "x" * 70, ""):
    with config_error("does not resolve on n7", "JAXSCALE_COORDINATOR=ADDRESS:PORT"):
      network.resolve(name or "a..b", patience_s=0)


def test_a_name_may_become_known_late(monkeypatch):
  answers = [OSError("not yet"), OSError("not yet"), [(2, 1, 6, "", ("10.1.2.3", 0))]]
  monkeypatch.setattr(socket, "getaddrinfo", unittest.mock.Mock(side_effect=answers))
  monkeypatch.delenv("SLURM_JOB_ID", raising=False)
  assert network.resolve("pod-0.svc", patience_s=5) == ["10.1.2.3"]


def test_slurm_knows_addresses_of_nodes_that_do_not_resolve(scontrol, monkeypatch, tmp_path):
  # A line of `scontrol --oneliner show node` of Slurm 22.05, shortened.
  scontrol("""
    line="NodeName=n1.invalid Arch=x86_64 NodeAddr=10.9.9.1 NodeHostName=vm Port=1"
    [ "$*" = "--oneliner show node n1.invalid" ] && echo $line
    echo "Node $4 not found" >&2""")
  monkeypatch.setenv("SLURM_JOB_ID", "1")
  assert network.resolve("n1.invalid", patience_s=0) == ["10.9.9.1"]
  with pytest.raises(ConfigError):
    network.resolve("n2.invalid", patience_s=0)
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(ConfigError):
    network.resolve("n1.invalid", patience_s=0)


def test_own_address_is_the_one_a_connection_has():
  with socket.create_server(("127.0.0.1", 0)) as server:
    client = socket.create_connection(server.getsockname())
    assert network.own_address_seen_by("127.0.0.1") == client.getsockname()[0]
    client.close()


def test_gloo_s_address_is_the_first_that_can_be_bound(monkeypatch):
  def entries(*addresses):
    return lambda *a, **k: [(socket.AF_INET, 1, 6, "", (x, 0)) for x in addresses]

  # 203.0.113.0/24 is for documentation (RFC 5737): no address of this host.
  monkeypatch.setattr(socket, "getaddrinfo", entries("203.0.113.9", "127.0.1.1"))
  assert network.gloo_address() == "127.0.1.1"
  monkeypatch.setattr(socket, "getaddrinfo", entries("203.0.113.9"))
  assert network.gloo_address() is None


def test_places_are_distinguished_by_network_namespace():
  code = "from jaxscale.cluster.rendezvous.network import namespace as n; print(n('net'))"
  own = [sys.executable, "-c", code]
  run = {"capture_output": True, "text": True}
  assert subprocess.run(own, **run).stdout.strip() == network.namespace("net")
  other = subprocess.run(["unshare", "-rn", *own], **run)
  if other.returncode:
    pytest.skip(f"no network namespace here: {other.stderr.strip()[:80]}")
  assert other.stdout.strip() != network.namespace("net")


def test_a_free_port_is_kept_and_refuses_callers():
  ports = network.ports_of("kept-port-test")
  port, (kept,) = network.bind_port(ports, [], listen=False)
  with kept:
    for listen in (False, True):
      other, (sock,) = network.bind_port(ports, [], listen)
      sock.close()
      assert other != port
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(("127.0.0.1", port), timeout=1)
    # JAX's coordinator sets SO_REUSEPORT, and shares a port with who sets it too.
    with socket.socket(socket.AF_INET6) as other, pytest.raises(OSError) as e:
      other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
      other.bind(("::", port))
    assert e.value.errno == errno.EADDRINUSE
  with network.bind_port([port], [], listen=False)[1][0]:
    pass
  with network.bind_port([port], [], listen=True)[1][0], pytest.raises(OSError):
    network.bind_port([port], [], listen=True)


def test_a_listener_takes_both_kinds_of_addresses():
  ports = network.ports_of("dual-test")
  port, (listener,) = network.bind_port(ports, [], listen=True)
  with listener:
    for host in ["127.0.0.1"] + ["::1"] * socket.has_dualstack_ipv6():
      with socket.create_connection((host, port), timeout=2) as client:
        server, (seen, *_) = listener.accept()
        server.close()
        assert network.plain_address(seen) == client.getsockname()[0] == host
        assert network.is_loopback(seen)


def test_hosts_are_excepted_from_proxies_once():
  env = {"http_proxy": "http://p:1"}
  network.bypass_proxies(["10.0.0.1", "n1"], env)
  assert env == {"http_proxy": "http://p:1", "no_proxy": "10.0.0.1,n1"}
  # gRPC does not look at no_proxy where no_grpc_proxy is set.
  env = {"no_grpc_proxy": "*", "no_proxy": "n1, .site"}
  for _ in range(2):
    network.bypass_proxies(["10.0.0.1", "n1"], env)
  assert env == {"no_grpc_proxy": "*,10.0.0.1,n1", "no_proxy": "n1,.site,10.0.0.1"}


WITHOUT_JAX = """
import sys
from jaxscale.cluster.rendezvous import client, handshake, join, network, server
handshake.versions()
assert not {"jax", "numpy"} & set(sys.modules)
"""


def test_nothing_here_waits_for_jax():
  subprocess.run([sys.executable, "-c", WITHOUT_JAX], check=True)
