"""Launcher of several processes on this machine, without a scheduler.

`jaxscale train` starts one copy of itself per GPU with `run`, and the executor `local` of
`jaxscale submit` starts its processes with the same variables and waits for them with `wait`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from jaxscale.cluster.detect import COORDINATOR, COUNT, INDEX, LAUNCHERS, LOCAL
from jaxscale.cluster.detect.local_devices import IDS, local_device_ids, visible_gpus
from jaxscale.cluster.environment import has_gpu_plugin
from jaxscale.cluster.launch import Env, Launch, number
from jaxscale.cluster.secret import VARIABLE as SECRET
from jaxscale.cluster.watch import signals
from jaxscale.errors import invalid

# Seconds between SIGTERM and SIGKILL; Slurm's KillWait has the same default.
GRACE_S = 30.0
OPTION = "--processes-per-node"
_LAUNCHER = "JAXSCALE_LAUNCHER_PID"
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_Process = subprocess.Popen[Any]


def choose_count(asked: int | None, env: Env = os.environ) -> int:
  """Return how many processes to start on this machine; 1 means that this process trains.

  Args:
    asked: the number that the user asked for. None means one per visible GPU, unless a
      launcher has started this process, or JAXSCALE_NUM_PROCESSES or JAX_LOCAL_DEVICE_IDS
      are set.
    env: the environment variables.

  Raises:
    ConfigError: this process is already one of several, or the GPUs cannot be divided.

  Example:
    >>> choose_count(None, {"JAX_PLATFORMS": "cpu"}), choose_count(2, {"JAX_PLATFORMS": "cpu"})
    (1, 2)
  """
  if asked == 1 or env.get(COORDINATOR):
    return 1  # The processes that `run` starts have the variable and the same options.
  # Without a plugin the process reports GPUs for computing; those for screens do not count.
  is_on_gpu = has_gpu_plugin() and not env.get("JAX_PLATFORMS", "").startswith("cpu")
  gpus = visible_gpus(env) if is_on_gpu else 0
  launch = next(filter(None, (launcher(env) for launcher in LAUNCHERS)), Launch("single"))
  if asked is None:
    # A pod outside an Indexed Job has a note, too, but is complete.
    is_one_of_several = launch.note and "KUBERNETES_SERVICE_HOST" not in env
    if launch.kind != "single" or is_one_of_several or env.get(COUNT) or env.get(IDS):
      return 1
    return max(gpus, 1)
  if launch.num_processes != 1:
    problem = f"but {launch.kind} has started this process as one of several"
    raise invalid(OPTION, asked, problem, "remove the option")
  local_device_ids(env, gpus, Launch(LOCAL, 0, asked, None, 0, asked))
  return asked


def variables(count: int) -> list[dict[str, str]]:
  """Return the environment variables of each process of a run on this machine.

  The processes find each other on loopback, at a port that follows from the new secret.
  Other users can read neither the secret nor listen on the port in place of process 0
  without being noticed (`cluster.secret`).
  """
  if count == 1:
    return [{COUNT: "1"}]
  common = {COORDINATOR: LOCAL, COUNT: str(count), SECRET: secrets.token_hex(32)}
  return [common | {INDEX: str(rank)} for rank in range(count)]


def run(command: Sequence[str], count: int) -> int:
  """Run `count` processes on this machine to their end, and return the exit code of the run.

  Signals are passed on to all processes. Process 0 has this process's output. Of the others,
  lines on stderr are printed with their rank. If this process is killed, the others save and
  end (`end_with_launcher`).

  Args:
    command: the command of each process.
    count: the number of processes.
  """
  processes: list[_Process] = []

  def forward(number: int, _: object) -> None:
    for process in processes:
      process.send_signal(number)
    if number == signal.SIGTSTP:
      os.kill(os.getpid(), signal.SIGSTOP)

  def relay(rank: int, stream: Any) -> None:
    for line in stream:
      with contextlib.suppress(OSError):  # a closed terminal must not block the process
        os.write(2, f"{rank}: ".encode() + line)

  threads = []
  for rank, own in enumerate(variables(count)):
    options: Any = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) if rank else {}
    options["env"] = {**os.environ, **own, _LAUNCHER: str(os.getpid())}
    # In a process group of their own, they do not receive the terminal's Ctrl-C twice.
    processes.append(
      subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, **options)
    )
    if rank:
      own_stream = rank, processes[rank].stderr
      threads.append(threading.Thread(target=relay, args=own_stream, daemon=True))
      threads[-1].start()
  # A signal before this line ends the launcher, and thereby the processes.
  signal.set_wakeup_fd(-1)  # `errors.leave` would end this process a second after Ctrl-C
  for each in (*signals.STOPPING, signal.SIGTSTP, signal.SIGCONT):
    if signal.getsignal(each) != signal.SIG_IGN:  # `nohup`
      signal.signal(each, forward)
  code, _ = wait(processes, threading.Event())
  for thread in threads:
    thread.join(timeout=1.0)  # a process left behind may keep the stream open
  for rank, process in enumerate(processes):
    if process.returncode in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
      name = signal.Signals(-process.returncode).name
      print(f"error: process {rank} was ended by {name}", file=sys.stderr, flush=True)
  return code


def end_with_launcher(env: Env = os.environ) -> None:
  """Ask the kernel to send this process SIGTERM when its launcher ends; see `run`."""
  launcher = number(env, _LAUNCHER)
  if launcher is None or sys.platform != "linux":
    return
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != launcher:  # it ended before
    os.kill(os.getpid(), signal.SIGTERM)


def wait(
  processes: Sequence[_Process], stop: threading.Event, asked_codes: Collection[int] = ()
) -> tuple[int, int | None]:
  """Wait for all processes; a failed one, or `stop`, ends the others, as with srun.

  Args:
    processes: the processes.
    stop: an event that ends all processes.
    asked_codes: exit codes of processes that were asked to stop.

  Returns:
    The exit code of the first failed process, or 0; and its rank, or None. The rank is
    returned if the process failed before the others noticed, so that SIGTERM ended them.
  """
  deadline, first, rank = None, 0, None
  while None in (codes := [p.poll() for p in processes]):
    if not first and (first := _worst(codes)):
      rank = next(i for i, code in enumerate(codes) if code)
    if deadline is None and (stop.is_set() or first):
      deadline = time.monotonic() + GRACE_S
      for process in processes:
        process.terminate()  # does nothing if it has ended
    elif deadline is not None and time.monotonic() > deadline:
      for process in processes:
        process.kill()
    time.sleep(_POLL_S)
  is_alone = first not in asked_codes and any(_worst([c]) in asked_codes for c in codes)
  return first or _worst(codes), rank if is_alone else None


def _worst(codes: Sequence[int | None]) -> int:
  """Return the highest exit code so far; a signal counts as 128 plus its number."""
  return max((128 - c if c < 0 else c for c in codes if c is not None), default=0)
