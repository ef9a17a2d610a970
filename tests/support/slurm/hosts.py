"""Hosts on this machine: own names and /etc/hosts, ended together.

A host is a mount and a UTS namespace: the processes in it see their own host
name and their own /etc/hosts, and nothing of this machine changes. By that
/etc/hosts, which stands in /proc/PID/mountinfo and which no process sheds, all
processes of a host are known, whatever they did to their environment, parents
or sessions; Slurm's steps change all three.

Of the folder whose hosts are meant only the name is compared: let `mkdtemp`
choose it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# In a host's namespaces: its own /etc/hosts and name, then the command.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def unavailable() -> str | None:
  """Return the reason that this machine cannot have hosts, or None."""
  missing = [name for name in ("unshare", "nsenter") if shutil.which(name) is None]
  if missing:
    return f"{', '.join(missing)}: not found; apt-get install util-linux"
  tried = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, text=True)
  if tried.returncode:
    return f"hosts need namespaces, and those need root: {tried.stderr.strip()}"
  return None


def new_net() -> str:
  """Return a random prefix of three numbers for addresses on the loopback net.

  Clusters that run at the same time use equal job numbers, and a port that a program
  derives from the number must not be that of another cluster.
  """
  chance = random.SystemRandom()
  return f"127.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}"


def address(net: str, index: int) -> str:
  """Return the loopback address of a folder's host by index."""
  return f"{net}.{10 + index}"


def write_names(folder: Path, net: str, names: Sequence[str]) -> None:
  """Create the hosts' folders, and the /etc/hosts that lists all hosts."""
  known = Path("/etc/hosts").read_text().rstrip("\n")
  known = "\n".join([known, *(f"{address(net, i)} {n}" for i, n in enumerate(names))])
  for name in names:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "hosts").write_text(known + "\n")


def as_host(folder: Path, host: str, *command: str) -> list[str]:
  """Return the command line on a new host, called `host`, with `folder/host/hosts`."""
  hosts = str(folder / host / "hosts")
  unshare = ["unshare", "--uts", "--mount", "--propagation", "slave"]
  return [*unshare, "sh", "-c", _ENTER, "sh", hosts, host, *command]


def on_host(pid: int, *command: str) -> list[str]:
  """Return the command line on the host of a process, in this directory."""
  join = ["nsenter", f"--target={pid}", "--uts", "--mount"]
  return [*join, "env", f"--chdir={os.getcwd()}", *command]


def _is_on(mounts: str, folder: str, host: str) -> bool:
  """Return True for a mountinfo of a process of this host; "*" is any of the folder."""
  for line in mounts.splitlines():
    root, point = line.split(" ", 5)[3:5]  # proc_pid_mountinfo(5)
    root = root.removesuffix("//deleted")  # the folder may be gone before them
    if point == "/etc/hosts" and Path(root).match(f"{folder}/{host}/hosts"):
      return True
  return False


def processes(folder: Path, host: str = "*") -> list[int]:
  """Return the ids of all processes on a host, or on all hosts of the folder."""
  found = []
  for entry in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):  # it has ended, or is a zombie
      if _is_on(Path("/proc", entry, "mountinfo").read_text(), folder.name, host):
        found.append(int(entry))
  return found


def kill(folder: Path, host: str = "*") -> None:
  """Kill all processes of a host, or of all hosts, at once: none sees another one end first."""
  quiet = 0
  while quiet < 2:  # what was being forked is seen at the second look
    # Children before their parents: of a stopped group that is orphaned, the kernel
    # wakes all by SIGHUP and SIGCONT (setpgid(2)), and srun would say goodbye.
    pids = sorted(processes(folder, host), reverse=True)
    pids = [pid for pid in pids if pid != os.getpid()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
      for pid in pids:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, number)
    quiet = 0 if pids else quiet + 1
    time.sleep(0.005)


def start_keeper(folder: Path, host: str) -> subprocess.Popen[str]:
  """Start a host that lives until its stdin closes, and then ends all hosts.

  The pipe closes when we close it and when we die, also by SIGKILL. The keeper
  has a session of its own, so that what hits our process group misses it.

  Raises:
    OSError: it did not start.
  """
  script = (sys.executable, str(Path(__file__).resolve()), str(folder))
  keeper = subprocess.Popen(
    as_host(folder, host, *script),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    start_new_session=True,
    text=True,
  )
  assert keeper.stdout is not None
  if keeper.stdout.readline() != "ready\n":
    raise OSError(f"no host {host}: its keeper exited with {keeper.wait()}")
  return keeper


def stop_keeper(keeper: subprocess.Popen[str], folder: Path) -> None:
  """End all hosts, including the keeper's.

  Closing its pipe is not enough: a process that was forked from this one may have it.
  """
  assert keeper.stdin is not None and keeper.stdout is not None
  keeper.stdin.close()
  keeper.stdout.close()
  kill(folder)
  keeper.wait(300)
  shutil.rmtree(folder, ignore_errors=True)


def _keep(folder: Path) -> None:
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  print("ready", flush=True)
  sys.stdin.read()
  kill(folder)
  shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
  _keep(Path(sys.argv[1]))
