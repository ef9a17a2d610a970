"""Processes of a preflight in a test; as a script, one of them."""

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

from jaxscale.cluster.group import Group, PeerError
from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous.client import rendezvous
from jaxscale.jobs import preflight as checks
from jaxscale.jobs.preflight.finding import Finding

HOSTS = ["n1", "n2", "n3", "n4"]


def start(hosts, options, patch="", rank_env=None):
  """Start the processes of a preflight, process 0 first; each runs `patch`."""
  from support.processes import start_group

  envs = [(rank_env or {}).get(rank, {}) for rank in range(len(hosts))]
  common = dict(hosts=hosts, options=[*map(str, options)], patch=textwrap.dedent(patch), envs=envs)
  return start_group([sys.executable, __file__, json.dumps(common)], len(hosts), 2)


def answers(processes, timeout=300):
  """Return (findings, seconds, whether JAX was imported) of each process that answers."""
  from support.processes import killed_at_end

  with killed_at_end(*processes):
    ended = [process.communicate(timeout=timeout) for process in processes]
  reported = []
  for process, (out, err) in zip(processes, ended, strict=True):
    if process.returncode == 0:
      findings, *rest = json.loads(out.splitlines()[-1])
      reported.append(([Finding(*f) for f in findings], *rest))
    else:
      assert process.returncode == 9, err
  return reported


def preflight(hosts, *options, patch="", rank_env=None):
  """Return the findings, which must be equal in all processes."""
  reported = answers(start(hosts, options, patch, rank_env))
  assert len(reported) == len(hosts)
  assert all(findings == reported[0][0] for findings, *_ in reported)
  return reported[0][0]


def wrong(findings):
  return [f.text for f in findings if not f.ok]


def only(*checks):
  """Return the option that skips all other checks."""
  every = ("software", "files", "devices", "disk")
  return "--skip=" + ",".join(set(every) - set(checks))


def make_options(words):
  """Return `preflight.Options` for words of the command line, each `--name=value`."""
  values = dict(word.removeprefix("--").split("=", 1) for word in words)
  named = {name.partition("config.")[2]: value for name, value in values.items()}
  overrides = {name: value for name, value in named.items() if name}
  skip = tuple(values.get("skip", "").split(","))
  workdir = Path(values.get("workdir", "."))
  return checks.Options(workdir, values.get("config"), overrides, skip)


def main(hosts, options, patch, envs):
  signal.alarm(300)  # whoever reads its lines waits no longer
  rank = int(os.environ["JAXSCALE_PROCESS_ID"])
  os.environ.update(envs[rank])
  host, _, port = os.environ["JAXSCALE_COORDINATOR"].partition(":")
  launch = Launch("test", rank, len(hosts), host, 0, 1, "preflight", port=int(port))
  links = rendezvous(launch, timeout_s=200).links
  exec(patch, {"rank": rank})
  began = time.monotonic()
  group = Group(rank, tuple(hosts), links)
  options = make_options(options)
  try:
    findings = checks.run_checks(group, options)
  except PeerError as e:
    findings = [[False, str(e), ""]]
  seconds = time.monotonic() - began
  print(json.dumps([findings, seconds, "jax" in sys.modules]), flush=True)
  os._exit(0)


if __name__ == "__main__":
  main(**json.loads(sys.argv[1]))
