"""A real Slurm for tests: one controller and some nodes, all on this machine.

Each node is Debian's slurmd in a mount and UTS namespace of its own, where the
host name is n1, n2, … and /etc/hosts knows the others: what a program reads from
`gethostname()` and what it can resolve is as it is on a cluster, and nothing of
this machine changes. A "login" host of the same kind holds the controller and
the commands that tests type. No munge, no systemd, no cgroups, no database.

A keeper process ends everything when the block is left or the test runner has
died, however: it kills what runs in the namespaces, so that no daemon, step or
task is missed, and none of another cluster is hit.

  with SlurmCluster(nodes=4) as slurm:
    print(slurm.run("srun", "-N2", "hostname").stdout)

By hand, an empty cluster and a shell on it: `python tests/slurm_cluster.py`.

Settings are those of https://slurm.schedmd.com/slurm.conf.html, tried with 22.05.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LOGIN = "login"
_COMMANDS = ("slurmctld", "slurmd", "srun", "sbatch", "unshare", "nsenter")
_ENDED = frozenset(
  "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY TIMEOUT"
  " PREEMPTED".split()
)
# In a host's namespaces: its own /etc/hosts and name, then the command.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def unavailable() -> str | None:
  """Why no cluster can be had here, in a line, or None."""
  missing = [name for name in _COMMANDS if shutil.which(name) is None]
  if missing:
    return (
      f"{', '.join(missing)}: not found; apt-get install --no-install-recommends "
      "slurmctld slurmd slurm-client"
    )
  if os.geteuid() != 0:
    return "Slurm's tests give each node a host name of its own, and need root for it"
  tried = subprocess.run(
    ["unshare", "--uts", "--mount", "true"], capture_output=True, text=True
  )
  if tried.returncode:
    return f"no namespaces here: {tried.stderr.strip()}"
  try:  # Slurm's look-ups ignore loopback, and then find no address at all
    socket.getaddrinfo("127.0.0.1", 1, flags=socket.AI_ADDRCONFIG)
  except socket.gaierror:
    return "this machine has only loopback: ip addr add 10.9.9.9/32 dev lo"
  return None


def members(folder: Path, host: str = "*") -> list[int]:
  """Processes on a host of a cluster, or on all: whose /etc/hosts is theirs."""
  found = []
  for entry in os.listdir("/proc"):
    if not entry.isdigit():
      continue
    try:
      mounts = Path("/proc", entry, "mountinfo").read_text()
    except OSError:  # it has ended, or is a zombie
      continue
    for line in mounts.splitlines():
      _, _, _, root, point, *_ = line.split(" ", 5)  # proc(5)
      if point == "/etc/hosts" and Path(root).match(f"{folder.name}/{host}/hosts"):
        found.append(int(entry))
        break
  return found


def _kill(pids: list[int], *signals: int) -> None:
  for number in signals:
    for pid in pids:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_all(folder: Path, host: str = "*") -> None:
  """SIGKILL to every process of a host or of all: stopped first, as by a plug."""
  me, quiet = os.getpid(), 0
  while quiet < 2:  # what has just been forked is seen in the second look
    pids = [pid for pid in members(folder, host) if pid != me]
    _kill(pids, signal.SIGSTOP, signal.SIGKILL)
    quiet = 0 if pids else quiet + 1
    time.sleep(0.005)


def _as_host(folder: Path, host: str, *command: str) -> list[str]:
  """The command, in new namespaces, where this machine is called `host`."""
  hosts = str(folder / host / "hosts")
  unshare = ["unshare", "--uts", "--mount", "--propagation", "slave"]
  return [*unshare, "sh", "-c", _ENTER, "sh", hosts, host, *command]


def _free_ports(count: int) -> list[int]:
  """Ports nobody listens on, below those the system gives to connections."""
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
    nodes: how many; they are called n1, n2, …
    cpus: CPUs Slurm gives out on each, whatever the machine has; tasks are not
      bound to any.
    gpus: GPUs Slurm gives out on each; the devices are copies of /dev/null.
    kill_wait: seconds between SIGTERM and SIGKILL, Slurm's KillWait.
    slurmd_timeout: seconds until a silent node is down, Slurm's SlurmdTimeout.
    cred_expire: seconds a job's credential lives; a requeued job does not start
      before (AuthInfo).
    extra: more lines for slurm.conf.
    parent: the directory that gets a folder with configuration and logs, which
      stays; by default a temporary one, which does not.

  Raises:
    TimeoutError: it did not come up, with the ends of its logs.
  """

  def __init__(
    self,
    nodes: int = 4,
    cpus: int = 2,
    gpus: int = 0,
    *,
    kill_wait: int = 5,
    slurmd_timeout: int = 10,
    cred_expire: int = 1,
    extra: str = "",
    parent: Path | None = None,
  ):
    self.names = [f"n{i}" for i in range(1, nodes + 1)]
    self.cpus, self.gpus, self.extra = cpus, gpus, extra
    self.kill_wait, self.slurmd_timeout = kill_wait, slurmd_timeout
    self.cred_expire = cred_expire
    # Its name is nobody else's: by it the cluster's processes are known.
    self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=parent))
    self._keep = parent is not None
    self._processes: dict[str, subprocess.Popen[bytes]] = {}
    self._keeper: subprocess.Popen[bytes] | None = None

  # Starting and stopping.

  def __enter__(self) -> SlurmCluster:
    try:
      for attempt in range(3):
        self._configure()
        self._start_keeper()
        self._daemon(_LOGIN, "slurmctld", "-D", "-c")
        for name in self.names:
          self._daemon(name, "slurmd", "-D", "-N", name)
        if self._wait_until_up(20):
          return self
        logs = self.logs()
        self._stop()
        if "Address already in use" not in logs or attempt == 2:
          raise TimeoutError(f"no Slurm after 20 s:\n{logs}")
      raise AssertionError("not reached")
    except BaseException:
      self.__exit__()
      raise

  def __exit__(self, *_: object) -> None:
    self._stop()
    if not self._keep:
      shutil.rmtree(self.folder, ignore_errors=True)

  def _configure(self) -> None:
    """Write slurm.conf and what goes with it."""
    ports = _free_ports(1 + len(self.names))
    for name in (_LOGIN, *self.names):
      (self.folder / name).mkdir(exist_ok=True)
      addresses = Path("/etc/hosts").read_text().rstrip("\n").splitlines()
      addresses += [f"127.0.0.{10 + i} {n}" for i, n in enumerate(self._hosts())]
      (self.folder / name / "hosts").write_text("\n".join(addresses) + "\n")
    lines = _CONFIGURATION.format(
      folder=self.folder,
      port=ports[0],
      kill_wait=self.kill_wait,
      slurmd_timeout=self.slurmd_timeout,
      cred_expire=self.cred_expire,
      extra=self.extra,
    )
    gres = f"Gres=gpu:{self.gpus} " if self.gpus else ""
    for i, (name, port) in enumerate(zip(self.names, ports[1:], strict=True)):
      lines += (
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.{11 + i} Port={port} "
        f"CPUs={self.cpus} RealMemory=4000 {gres}State=UNKNOWN\n"
      )
    lines += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE\n"
    if self.gpus:
      lines += "GresTypes=gpu\n"
      self._make_gpus()
    (self.folder / "slurm.conf").write_text(lines)
    # Else slurmd looks for a cgroup file system, and dies where none is mounted.
    (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

  def _make_gpus(self) -> None:
    for i in range(self.gpus):
      device = self.folder / f"gpu{i}"
      if not device.exists():
        os.mknod(device, 0o20666, os.stat("/dev/null").st_rdev)
    files = f"{self.folder}/gpu[0-{self.gpus - 1}]"
    (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={files}\n")

  def _hosts(self) -> list[str]:
    return [_LOGIN, *self.names]

  def _start_keeper(self) -> None:
    """The process that ends everything once our end of its pipe is closed."""
    script = (sys.executable, str(Path(__file__).resolve()), "keep", str(self.folder))
    self._keeper = subprocess.Popen(
      _as_host(self.folder, _LOGIN, *script),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,
    )
    assert self._keeper.stdout is not None
    if not self._keeper.stdout.readline():
      raise OSError("the keeper of the Slurm cluster did not start")

  def _daemon(self, host: str, *command: str) -> None:
    """Start one of Slurm's daemons on a host, with a log."""
    enter = self._enter(host) if host == _LOGIN else _as_host(self.folder, host)
    with open(self.folder / host / "out.log", "ab") as log:
      self._processes[host] = subprocess.Popen(
        [*enter, *command],
        env=self.environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )

  def _wait_until_up(self, seconds: float) -> bool:
    up = [str(len(self.names)), "idle"]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
      if self.run("sinfo", "-h", "-o", "%D %t", check=False).stdout.split() == up:
        return True
      if any(p.poll() is not None for p in self._processes.values()):
        return False
      time.sleep(0.02)
    return False

  def _stop(self) -> None:
    if self._keeper is not None:
      assert self._keeper.stdin is not None and self._keeper.stdout is not None
      self._keeper.stdin.close()
      self._keeper.wait()
      self._keeper.stdout.close()
    for process in self._processes.values():
      process.kill()  # a daemon that was not yet in its namespaces
      process.wait()
    self._processes, self._keeper = {}, None

  def logs(self, characters: int = 1500) -> str:
    """The ends of the daemons' logs."""
    logs = sorted(self.folder.glob("*/*.log"))
    return "\n".join(f"== {p}\n{p.read_text()[-characters:]}" for p in logs)

  # Commands.

  def environment(self, **extra: str) -> dict[str, str]:
    """Ours, with this cluster's configuration and nothing else of Slurm."""
    ours = {
      name: value
      for name, value in os.environ.items()
      if not name.startswith(("SLURM", "SBATCH_", "SRUN_", "SALLOC_"))
    }
    return ours | {"SLURM_CONF": str(self.folder / "slurm.conf")} | extra

  def _enter(self, host: str) -> list[str]:
    """What runs a command on a host that is up, in this directory."""
    if host == _LOGIN:
      assert self._keeper is not None
      pid = self._keeper.pid
    else:
      pid = self._processes[host].pid
    return ["nsenter", "-t", str(pid), "--uts", "--mount", "env", "-C", os.getcwd()]

  def start(self, *command: str, host: str = _LOGIN, **env: str):
    """Start a command as typed on a host; its output is piped, as text."""
    return subprocess.Popen(
      [*self._enter(host), *command],
      env=self.environment(**env),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def run(
    self,
    *command: str,
    host: str = _LOGIN,
    timeout: float = 120,
    check: bool = True,
    **env: str,
  ) -> subprocess.CompletedProcess[str]:
    """Run a command as typed on a host to its end.

    Args:
      command: its words.
      host: "login", or a node, as with ssh.
      timeout: seconds after which it is killed.
      check: whether an exit status that is not 0 is an error.
      env: variables to set.

    Raises:
      AssertionError: it failed, with all that it said.
      subprocess.TimeoutExpired: it took too long.
    """
    process = self.start(*command, host=host, **env)
    try:
      out, err = process.communicate(timeout=timeout)
    except BaseException:
      process.kill()
      process.communicate()
      raise
    code = process.returncode
    assert not check or code == 0, f"{command} exited with {code}:\n{out}{err}"
    return subprocess.CompletedProcess(command, code, out, err)

  def submit(self, script: str, *options: str, **env: str) -> str:
    """Submit a script's text with sbatch's options; the job's id."""
    path = self.folder / f"job-{time.monotonic_ns()}.sh"
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    done = self.run("sbatch", "--parsable", *options, str(path), **env)
    return done.stdout.strip()

  def job(self, job: str) -> dict[str, str]:
    """What `scontrol show job` says of a job, or of an array's task "12_3".

    Jobs stay known for 300 s after their end (MinJobAge).
    """
    text = self.run("scontrol", "-o", "show", "job", job).stdout.splitlines()[0]
    return dict(word.split("=", 1) for word in text.split() if "=" in word)

  def queue(self) -> dict[str, str]:
    """The state of each job that waits or runs, by id ("12_3" in an array)."""
    lines = self.run("squeue", "-h", "-r", "-o", "%i %T").stdout.splitlines()
    return dict(line.split() for line in lines)

  def wait_for(self, job: str, *states: str, seconds: float = 60) -> dict[str, str]:
    """Wait until a job is in one of the states, by default in one of its ends.

    Raises:
      AssertionError: it ended in another state.
      TimeoutError: it is in none of them after these seconds.
    """
    wanted, deadline = frozenset(states) or _ENDED, time.monotonic() + seconds
    while (shown := self.job(job))["JobState"] not in wanted:
      state = shown["JobState"]
      assert state not in _ENDED or shown.get("Requeue") == "1", shown
      if time.monotonic() > deadline:
        raise TimeoutError(f"job {job} is {state}, not {'/'.join(wanted)}: {shown}")
      time.sleep(0.05)
    return shown

  def clear(self) -> None:
    """Kill all jobs, and bring back nodes that are down."""
    self.run("scancel", "-f", "-s", "KILL", "-u", "root", check=False)
    self.run("scancel", "-f", "-u", "root", check=False)
    for name in self.names:
      if self._processes[name].poll() is not None:
        self.start_node(name)
    if not self._wait_until_up(60):
      raise TimeoutError(f"the cluster is not idle again:\n{self.logs()}")

  # Faults.

  def processes(self, host: str) -> list[int]:
    """All processes of a host, by id: daemons, steps, tasks, commands."""
    return members(self.folder, host)

  def kill_node(self, name: str) -> None:
    """End a node at once: its slurmd, steps and tasks.

    Its connections are closed by this machine's kernel, as after a crash of
    processes; a node that has lost its power would say nothing.
    """
    _kill_all(self.folder, name)
    self._processes[name].wait()

  def start_node(self, name: str) -> None:
    """Start a node that was killed."""
    self._daemon(name, "slurmd", "-D", "-N", name)


_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=login(127.0.0.10)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire={cred_expire}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout={slurmd_timeout}
MessageTimeout=10
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmctldPidFile={folder}/login/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n/spool
StateSaveLocation={folder}/login/state
SlurmctldLogFile={folder}/login/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/login/jobs.txt
MailProg=/bin/true
{extra}
"""


def _keep(folder: Path) -> None:
  """End everything in the cluster once nobody holds the other end of stdin."""
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  print("ready", flush=True)
  sys.stdin.buffer.read()
  _kill_all(folder)


def _main(arguments: list[str]) -> None:
  if arguments[:1] == ["keep"]:
    _keep(Path(arguments[1]))
    return
  with SlurmCluster() as slurm:
    subprocess.run(
      [*slurm._enter(_LOGIN), *(arguments or ["bash"])], env=slurm.environment()
    )


if __name__ == "__main__":
  _main(sys.argv[1:])
