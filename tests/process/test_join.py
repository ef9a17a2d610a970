"""JAX is joined by real processes, where JAX alone would hang, abort or be silent."""

import contextlib
import json
import socket
import sys
import time

import pytest

from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous import network
from jaxscale.cluster.rendezvous.client import ProcessGroup
from jaxscale.cluster.rendezvous.join import join
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.errors import ConfigError
from support.commands import child_env, own_lines
from support.fault_table import measured
from support.processes import run_group
from support.rendezvous import job

CHILD = """
import json, os, signal, sys, time
from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous import network
from jaxscale.cluster.rendezvous.join import check_devices, join
from jaxscale.cluster.rendezvous.client import rendezvous
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.errors import ConfigError
a = json.loads(sys.argv[1])
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append("TERM"))
launch = Launch("test", a["rank"], a["of"], a["host"], 0, 1, a["job"])
if a["apart"]:  # as on two hosts: they see other files
  network.namespace = lambda kind: f"{a['rank']}" if kind == "mnt" else "one"
try:
  group = rendezvous(launch, timeout_s=200)
  began = time.monotonic()
  join(launch, group, Timeouts(), None)
  joined = time.monotonic() - began
  check_devices(group)
except ConfigError as e:
  print(json.dumps({"error": str(e)}), flush=True)
  os._exit(2)
import jax
from jax.experimental.multihost_utils import process_allgather
import numpy as np
total = process_allgather(np.float32(a["rank"] + 1)).sum()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
link = list(group.links.values())[0]
link.send({"still": a["rank"]})
print(json.dumps({
  "total": float(total), "processes": jax.process_count(), "signals": got,
  "devices": jax.local_device_count(), "joined": joined,
  "heard": link.receive(200), "coordinator": group.coordinator,
}), flush=True)
"""


@pytest.fixture
def results(child):
  """Return a function that runs processes with JAX and kills them: JAX swallows SIGTERM."""

  def run(name, envs, apart=False):
    running, usual = [], dict(of=len(envs), host="127.0.0.1", apart=apart, job=job(name))
    for rank, env in enumerate(envs):
      options = json.dumps(usual | {"rank": rank})
      running.append(child(CHILD, options, env=child_env() | env))
    return [(p.communicate(timeout=200), p.returncode) for p in running]

  return run


def test_two_processes_join_behind_a_dead_proxy_and_own_their_signals(results):
  """Plain jax.distributed.initialize hangs there."""
  # It takes connections and never says a word, like a proxy that hangs.
  proxy = socket.create_server(("127.0.0.1", 0))
  address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
  # What a batch system leaves behind, and JAX's own detection would go by.
  env = dict(http_proxy=address, https_proxy=address, no_grpc_proxy="*")
  env |= dict(JAX_COORDINATOR_BIND_ADDRESS="[::]:1", JAX_COORDINATOR_ADDRESS="no:1")
  env |= dict(JAX_COORDINATOR_PORT="1")
  began = time.monotonic()
  with proxy:
    got = results("proxy", [env] * 2, apart=True)
  for rank, ((out, err), code) in enumerate(got):
    assert code == 0, err
    reported = json.loads(own_lines(out)[-1])
    assert reported["total"] == 3 and reported["processes"] == 2 and reported["devices"] == 1
    assert reported["signals"] == ["TERM"]
    assert reported["heard"] == {"still": 1 - rank}
    assert reported["coordinator"].startswith("127.0.0.1:")
    assert "proxy" not in err
  measured("http_proxy to a dead proxy", None, 0, "initialized as usual")
  assert time.monotonic() - began < 250  # JAX waits 300 s


CORES = """
import os, socket, sys
from jaxscale import cluster
cluster.initialize()
rank = int(os.environ["JAXSCALE_PROCESS_ID"])
socket.gethostname = lambda: "ab"[rank // 3]
masks = [*[range(12)] * 3, range(8), range(4, 8), range(8, 9)]
os.sched_getaffinity = lambda process: {*masks[rank]}
print(cluster.share_of_cores(), cluster.share_of_cores(), flush=True)
"""


def test_processes_of_a_host_divide_the_cores_they_share():
  """Three without a binding, and three of another host, of which two overlap."""
  ended = run_group([sys.executable, "-c", CORES], count=6)
  for (out, err, code), share in zip(ended, [4, 4, 4, 4, 2, 1], strict=True):
    assert code == 0, err
    assert own_lines(out) == [f"{share} {share}"]


def test_the_coordinator_s_port_is_never_free_for_others(monkeypatch):
  """From the group until JAX listens, though both are in one process."""
  ports = network.ports_of(f"kept-{time.monotonic_ns()}")
  port, (kept,) = network.bind_port(ports, [], listen=False)
  bound = []

  def initialize(*_, **__):
    for option in (0, 1):  # a stranger's way, and gRPC's
      with socket.socket(kept.family) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, option)
        with contextlib.suppress(OSError):
          other.bind(kept.getsockname())
          bound.append(option)

  monkeypatch.setattr("jax.distributed.initialize", initialize)
  launch = Launch("test", 0, 2, "127.0.0.1", 0, 1, "kept")
  group = ProcessGroup(0, 2, ["n1", "n2"], f"127.0.0.1:{port}", {}, b"", kept)
  join(launch, group, Timeouts(), None)
  assert bound == [1] and kept.fileno() == -1


def test_other_numbers_of_devices_are_one_line_in_all(results):
  devices = [dict(JAX_NUM_CPU_DEVICES=str(n)) for n in (2, 1)]
  got = results("devices", [x | dict(SLURMD_NODENAME=f"n{i}") for i, x in enumerate(devices, 1)])
  lines = {json.loads(own_lines(out)[-1])["error"] for (out, _), _ in got}
  assert [code for _, code in got] == [2, 2]
  (line,) = lines
  assert line.startswith("numbers of devices differ: process 1 (n2) with 1, others with 2; give")


def test_a_coordinator_that_cannot_be_reached_is_a_line_not_an_abort():
  ports = network.ports_of(f"no-jax-{time.monotonic_ns()}")
  port, (kept,) = network.bind_port(ports, [], listen=False)
  with kept:
    group = ProcessGroup(1, 2, ["n1", "n2"], f"127.0.0.1:{port}", {})
    launch = Launch("test", 1, 2, "n1", 0, 1, "j")
    began = time.monotonic()
    with pytest.raises(ConfigError) as e:
      join(launch, group, Timeouts(jax_initialization_timeout_s=1), None)
  assert time.monotonic() - began < 250  # JAX's own default is 300 s
  assert str(e.value) == (
    f"process 1 (n2): cannot reach JAX's coordinator on n1, 127.0.0.1:{port}, within 1 s "
    "(refused); see the output of process 0"
  )
