"""Real Slurm for tests: one controller and several nodes, all on this machine.

Each node is Debian's slurmd on a host of its own (slurm_hosts.py), called n1,
n2, …, with an address on the loopback net: what programs read from
`gethostname()` and can resolve is as on a cluster. A host "login" has the
controller and the commands that tests type. No munge, no systemd, no cgroups,
no database. It ends with its block, and also when the test runner is killed.

  with SlurmCluster(nodes=4) as slurm:
    print(slurm.run("srun", "-N2", "hostname").stdout)

By hand, a shell on it: `python tests/support/slurm`; or any command:
`python tests/support/slurm srun -N4 hostname`.

Tried with Slurm 22.05.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from support.processes import popen
from support.slurm import hosts
from support.slurm import settings as slurm_settings

_COMMANDS = ("slurmctld", "slurmd", "srun", "sbatch")
# Job state codes of squeue(1) after which nothing follows, but for a requeue.
_ENDS = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
_ENDS |= {"OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}


def unavailable() -> str | None:
  """Return the reason that no cluster can run on this machine, or None."""
  missing = [name for name in _COMMANDS if shutil.which(name) is None]
  if missing:
    return (
      f"{', '.join(missing)}: not found; apt-get install --no-install-recommends "
      "slurmctld slurmd slurm-client"
    )
  try:  # Slurm looks names up like this, and loopback alone then finds nothing
    socket.getaddrinfo("127.0.0.1", 1, flags=socket.AI_ADDRCONFIG)
  except socket.gaierror:
    return "only loopback here, no address for Slurm: ip addr add 10.9.9.9/32 dev lo"
  return hosts.unavailable()


def _free_ports(count: int) -> list[int]:
  """Return ports that nobody listens on, below those that the system assigns to connections."""
  ports: list[int] = []
  while len(ports) < count:
    port = random.SystemRandom().randrange(10000, 20000)
    with socket.socket() as probe, contextlib.suppress(OSError):
      probe.bind(("", port))
      ports += [port] if port not in ports else []
  return ports


class SlurmCluster:
  """A Slurm cluster on this machine, for as long as its block lasts.

  Args:
    nodes: the number of nodes; they are called n1, n2, …
    cpus: the CPUs per node that Slurm assigns, whatever this machine has; tasks are
      not bound.
    extra: further lines for slurm.conf; the last line for an option counts.

  Raises:
    TimeoutError: it did not start; the message has the last lines of its logs.
  """

  def __init__(self, nodes: int = 4, cpus: int = 2, *, extra: str = ""):
    self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
    self.folder = Path()
    self._settings = cpus, extra
    self.net = hosts.new_net()
    self._port = 0
    self._daemons: dict[str, subprocess.Popen[bytes]] = {}
    self._keeper: subprocess.Popen[str] | None = None

  def __enter__(self) -> SlurmCluster:
    logs = ""
    for _ in range(3):
      with contextlib.ExitStack() as undo:
        undo.callback(self.__exit__)
        if self._start():
          undo.pop_all()
          return self
        logs = self.logs()
      if "Address already in use" not in logs:  # taken since we looked
        break
    raise TimeoutError(f"no Slurm:\n{logs}")

  def __exit__(self, *_: object) -> None:
    for daemon in self._daemons.values():
      daemon.kill()
    if self._keeper is not None:
      hosts.stop_keeper(self._keeper, self.folder)
    for daemon in self._daemons.values():
      daemon.wait(300)
    self._daemons, self._keeper = {}, None

  def _start(self) -> bool:
    """Start the hosts and daemons, in a folder of their own; return whether all answer."""
    self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    self._configure()
    self._keeper = hosts.start_keeper(self.folder, "login")
    self.start_controller("-c")
    for node in self.nodes:
      self.start_node(node)
    return self._wait_until_idle(200)

  def _configure(self) -> None:
    """Write the configuration for ports that are free now."""
    self._port, *ports = _free_ports(1 + len(self.nodes))
    hosts.write_names(self.folder, self.net, ["login", *self.nodes])
    by_node = dict(zip(self.nodes, ports, strict=True))
    slurm_settings.write(self.folder, self.net, self._port, by_node, *self._settings)

  def _start_daemon(self, host: str, command: list[str]) -> None:
    streams = dict(stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
    with open(self.folder / host / "out.log", "ab") as log:
      env = self.environment()
      self._daemons[host] = subprocess.Popen(command, env=env, stdout=log, **streams)

  def start_controller(self, *options: str) -> None:
    """Start slurmctld, with options, and wait until it answers."""
    command = ["slurmctld", "-D", *options]
    self._start_daemon("login", hosts.on_host(self._pid("login"), *command))
    address = hosts.address(self.net, 0), self._port
    deadline = time.monotonic() + 60  # a slurmd that finds nobody waits for long
    while time.monotonic() < deadline and self._daemons["login"].poll() is None:
      with contextlib.suppress(OSError):
        socket.create_connection(address, timeout=1).close()
        return
      time.sleep(0.01)

  def start_node(self, node: str) -> None:
    """Start a node, the first time or after it was killed."""
    slurmd = ["slurmd", "-D", "-N", node]
    self._start_daemon(node, hosts.as_host(self.folder, node, *slurmd))

  def kill_node(self, node: str) -> None:
    """End a node at once: its slurmd, steps and tasks.

    Their connections are closed, as after a crash; a node that lost its power
    would say nothing.
    """
    hosts.kill(self.folder, node)
    self._daemons[node].wait(300)

  @property
  def keeper_pid(self) -> int:
    """Return the id of a process on the host on which commands are typed."""
    return self._pid("login")

  def _pid(self, host: str) -> int:
    process = self._keeper if host == "login" else self._daemons[host]
    assert process is not None and process.poll() is None, f"{host} is not up"
    return process.pid

  def _wait_until_idle(self, seconds: float) -> bool:
    wanted, deadline = [str(len(self.nodes)), "idle"], time.monotonic() + seconds
    while time.monotonic() < deadline:
      if self.run("sinfo", "-h", "-o", "%D %t", check=False).stdout.split() == wanted:
        return True
      if any(daemon.poll() is not None for daemon in self._daemons.values()):
        break
      time.sleep(0.02)
    return False

  def logs(self, characters: int = 1500) -> str:
    """Return the last lines of the daemons' logs."""
    logs = sorted(self.folder.glob("*/*.log"))
    return "\n".join(f"== {p}\n{p.read_text()[-characters:]}" for p in logs)

  def environment(self, **extra: str) -> dict[str, str]:
    """Return our variables, with the configuration of this cluster and no other Slurm variable."""
    foreign = ("SLURM", "SBATCH_", "SALLOC_")
    ours = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return ours | {"SLURM_CONF": str(self.folder / "slurm.conf")} | extra

  def start(self, *command: str, host: str = "login", **env: str) -> subprocess.Popen[str]:
    """Start a command on a host, in this directory, with its output in pipes."""
    command, env = hosts.on_host(self._pid(host), *command), self.environment(**env)
    return popen(*command, cwd=None, env=env, stdin=subprocess.DEVNULL)

  def run(
    self, *command: str, host: str = "login", timeout: float = 120, check: bool = True, **env: str
  ) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
      command: the words of the command.
      host: "login", or a node, as with ssh.
      timeout: the seconds after which it is killed.
      check: whether an exit status that is not 0 is an error.
      env: variables to set.

    Raises:
      AssertionError: it failed; the message has all of its output.
      TimeoutError: it took too long; the message has all of its output.
    """
    process, late = self.start(*command, host=host, **env), False
    try:
      out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
      process.kill()
      late, out, err = True, "", "a child of it keeps its output open"
      with contextlib.suppress(subprocess.TimeoutExpired):
        out, err = process.communicate(timeout=10)
    reported = f"{' '.join(command)}: exit status {process.returncode}\n{out}{err}"
    if late:
      raise TimeoutError(f"after {timeout} s, {reported}")
    assert not check or process.returncode == 0, reported
    return subprocess.CompletedProcess(command, process.returncode, out, err)

  def submit(self, script: str, *options: str, **env: str) -> str:
    """Submit the text of a shell script with sbatch's options; return the job's id."""
    path = self.folder / f"{time.monotonic_ns()}.sh"
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    command = ["sbatch", "--parsable", f"--output={self.folder}/job-%j.out", *options]
    done = self.run(*command, str(path), timeout=300, check=True, host="login", **env)
    return done.stdout.strip()

  def job(self, job: str) -> dict[str, str]:
    """Return what `scontrol show job` says of a job, or of an array's task "12_3".

    Slurm knows a job for 300 s after its end (MinJobAge).
    """
    text = self.run("scontrol", "-o", "show", "job", job).stdout.splitlines()[0]
    return dict(word.split("=", 1) for word in text.split() if "=" in word)

  def output(self, job: str) -> str:
    """Return the output of a job's script; "" before it starts."""
    path = Path(self.job(job)["StdOut"])
    return path.read_text() if path.exists() else ""  # RUNNING comes before the file

  def wait_for(self, job: str, *states: str, seconds: float = 300) -> dict[str, str]:
    """Wait until a job is in one of the states, by default an end state.

    Raises:
      AssertionError: it ended in another state, and was not requeued within 20 s.
      TimeoutError: it is in none of the states after these seconds.
    """
    wanted = set(states) or _ENDS
    start, ended = time.monotonic(), None
    while (shown := self.job(job))["JobState"] not in wanted:
      now, state = time.monotonic(), shown["JobState"]
      ended = (ended or now) if state in _ENDS else None
      reported = f"job {job} is {state}, not {' or '.join(wanted)}: {shown}"
      assert ended is None or now - ended < 20, reported
      if now - start > seconds:
        raise TimeoutError(reported)
      time.sleep(0.05)
    return shown

  def end_at(self, job: str, seconds: float) -> None:
    """Make a running job reach its time limit in so many seconds.

    Limits are in minutes, but an operator may set them to the second. Slurm checks the
    limits about every 30 s.
    """
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    self.run("scontrol", "update", f"JobId={job}", f"EndTime={end}")

  def clear(self) -> None:
    """Kill all jobs and restart stopped daemons, so that the cluster is as at its start.

    Raises:
      TimeoutError: something does not end.
    """
    self.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
    self.run("scancel", "--full", "--user=root", check=False)
    for node in self.nodes:
      if self._daemons[node].poll() is not None:
        self.start_node(node)
    if not self._wait_until_idle(60):
      # Slurm drains a node where it could not kill a step within UnkillableStepTimeout.
      for node in self.nodes:
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    if not self._wait_until_idle(200):
      raise TimeoutError(f"the cluster is not idle:\n{self.logs()}")
