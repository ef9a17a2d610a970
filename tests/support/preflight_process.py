"""The processes of a preflight in a test; run as a script, one of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError
from jaxscale.jobs import preflight as checks
from jaxscale.jobs.preflight.finding import Finding
from jaxscale.jobs.preflight.group import Group

HOSTS = ["n1", "n2", "n3", "n4"]


def start(hosts, options, patch="", rank_env=None):
  """The processes of a preflight, process 0 first; `patch` is run in each."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  common = {"hosts": hosts, "port": port, "patch": textwrap.dedent(patch)}
  common |= {"options": list(map(str, options))}
  from support.commands import child_env
  from support.paths import ROOT

  processes = []
  for rank in range(len(hosts)):
    env = child_env(2, PYTHONPATH=str(ROOT), **(rank_env or {}).get(rank, {}))
    command = [sys.executable, __file__, json.dumps(common | {"rank": rank})]
    process = subprocess.Popen(
      command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    processes.append(process)
    if rank == 0:
      assert process.stdout is not None
      assert process.stdout.readline() == "listening\n", process.communicate()[1]
  return processes


def answers(processes, timeout=300):
  """(findings, seconds, whether JAX was imported) of each that says something."""
  try:
    ended = [process.communicate(timeout=timeout) for process in processes]
  finally:
    for process in processes:
      process.kill()
  reported = []
  for process, (out, err) in zip(processes, ended, strict=True):
    if process.returncode == 0:
      findings, *rest = json.loads(out.splitlines()[-1])
      reported.append(([Finding(*f) for f in findings], *rest))
    else:
      assert process.returncode == 9, err
  return reported


def preflight(hosts, *options, patch="", rank_env=None):
  """The findings, which are the same in all processes."""
  reported = answers(start(hosts, options, patch, rank_env))
  assert len(reported) == len(hosts)
  assert all(findings == reported[0][0] for findings, *_ in reported)
  return reported[0][0]


def wrong(findings):
  return [f.text for f in findings if not f.ok]


def only(*checks):
  """The option that leaves out all other checks."""
  every = ("software", "clocks", "network", "files", "devices", "disk")
  return "--skip=" + ",".join(set(every) - set(checks))


def connect(rank, size, port):
  """Sockets as the rendezvous leaves them: to all in process 0, to it elsewhere."""
  if rank:
    return {0: socket.create_connection(("127.0.0.1", port), timeout=None)}
  # For IPv4 and IPv6 where there are both, as the rendezvous does.
  both = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both else socket.AF_INET
  with socket.create_server(("", port), family=family, backlog=size, dualstack_ipv6=both) as server:
    print("listening", flush=True)
    links = [server.accept()[0] for _ in range(size - 1)]
  found = {}
  for sock in links:
    found[int(sock.recv(8))] = sock
  return found


def make_options(words):
  """`preflight.Options` from words of the command line, each `--name=value`."""
  values = dict(word.removeprefix("--").split("=", 1) for word in words)
  overrides = {
    name.removeprefix("config."): value
    for name, value in values.items()
    if name.startswith("config.")
  }
  skip = tuple(values.get("skip", "").split(","))
  workdir = Path(values.get("workdir", "."))
  return checks.Options(workdir, values.get("config"), overrides, skip)


def main(rank, hosts, port, options, patch):
  signal.alarm(300)  # whoever reads its lines waits no longer
  links = connect(rank, len(hosts), port)
  if rank:
    links[0].sendall(f"{rank:8}".encode())
  for sock in links.values():
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  exec(patch, {"rank": rank})
  began = time.monotonic()
  links = {r: Link(sock) for r, sock in links.items()}
  group = Group(rank, tuple(hosts), links, b"key")
  options = make_options(options)
  try:
    findings = checks.run_checks(group, options)
  except ConfigError as e:
    findings = [[False, str(e), ""]]
  seconds = time.monotonic() - began
  print(json.dumps([findings, seconds, "jax" in sys.modules]), flush=True)
  os._exit(0)


if __name__ == "__main__":
  main(**json.loads(sys.argv[1]))
