"""Runs on this machine: the same verbs where there is no Slurm.

A supervisor, detached from the terminal, does what Slurm and the batch script do
elsewhere: it starts the processes of a trial, ends them all when one fails, starts
them again when that is of use, keeps the diary, and lets a sweep's trials run some
at a time. It runs the folder's own copy of the code, as the processes do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.launch import folder as folders
from jaxscale.launch import spec
from jaxscale.launch.render import NOT_STARTED_AGAIN, STARTED_AGAIN
from jaxscale.launch.spec import Run

# Seconds between SIGTERM and SIGKILL; Slurm's KillWait has the same default.
GRACE_S = 30.0
_POLL_S = 0.1


def submit(
  run: Run, tasks: Sequence[int] | None = None, after: Path | None = None
) -> str:
  """Start the supervisor of a run; returns a name for what it does.

  Args:
    run: whose folder is made.
    tasks: of a sweep, those to run; None: all.
    after: folder of a run of this machine that is to have ended before.

  Raises:
    ConfigError: it does not start.
  """
  job = f"local-{time.time_ns() // 1_000_000}"
  wanted = [str(t) for t in (run.tasks if tasks is None else tasks)]
  command = [sys.executable, "-m", "jaxscale.launch.local", run.folder, job, *wanted]
  command += [f"--after={after}"] if after else []
  env = {**os.environ, "PYTHONPATH": f"{run.folder}/code", "PYTHONSAFEPATH": "1"}
  done = subprocess.run(
    command, env=env, cwd=run.cwd, stdin=subprocess.DEVNULL, capture_output=True,
    text=True,
  )  # fmt: skip
  if done.returncode:
    lines = done.stderr.strip().splitlines() or ["it did not start"]
    raise ConfigError(f"{run.folder}: {lines[-1]}")
  return job


def is_alive(folder: Path) -> bool:
  """Whether the supervisor of the last submission runs, on this machine."""
  return _supervisor(folder) is not None


def _supervisor(folder: Path) -> int | None:
  lines = folders.read_lines(folder / "supervisor.jsonl")
  if not lines or lines[-1]["host"] != socket.gethostname():
    return None
  pid = lines[-1]["pid"]
  return pid if _born(pid) == lines[-1]["born"] else None


def cancel(folder: Path) -> None:
  """End what runs: SIGTERM, and SIGKILL after the grace.

  Where the supervisor was killed and its processes were not, they are ended here.
  """
  if (pid := _supervisor(folder)) is not None:
    os.kill(pid, signal.SIGTERM)
    return
  for line in folders.read_lines(folder / "processes.jsonl"):
    if line["host"] == socket.gethostname() and _born(line["pid"]) == line["born"]:
      os.kill(line["pid"], signal.SIGKILL)


def _born(pid: int) -> int | None:
  """When a process started, in clock ticks since boot: a number is used again.

  Field 22 of /proc/PID/stat, counted after the name in brackets (proc(5)); None for
  a process that is gone, or a zombie.
  """
  try:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  return None if fields[0] == "Z" else int(fields[19])


def supervise(
  run: Run, job: str, tasks: Sequence[int], after: Path | None = None
) -> None:
  """Run trials, some at a time, until all have ended or SIGTERM says to stop."""
  stop = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: stop.set())
  while after and is_alive(after) and not stop.is_set():
    time.sleep(_POLL_S)
  with ThreadPoolExecutor(run.at_most or len(tasks)) as pool:
    trials = [pool.submit(_trial, run, job, task, stop) for task in tasks]
    while not all(t.done() for t in trials):  # here, and not in a lock, for signals
      time.sleep(_POLL_S)
  for trial in trials:
    trial.result()


def _trial(run: Run, job: str, task: int, stop: threading.Event) -> None:
  """Start a trial, and start it again as long as that is of use."""
  diary = spec.events_file(run, task)
  for restarts in range(run.requeue + 1):
    if stop.is_set():
      return
    event: dict[str, Any] = {"event": "start", "job": job, "restarts": restarts}
    event |= {"nodes": 1, "hosts": socket.gethostname(), "code": 0, "next": ""}
    folders.append(diary, event | {"time": round(time.time())})
    before = newest(spec.workdir(run, task))
    code = _preflight(run, job, task, stop) if run.preflight else 0
    code = code or _once(run, job, task, stop)
    progress = newest(spec.workdir(run, task)) != before
    again = starts_again(code, progress) and not stop.is_set()
    again = again and restarts < run.requeue
    event |= {"event": "end", "code": code, "next": "requeue" if again else "stop"}
    folders.append(diary, event | {"time": round(time.time())})
    if not again:
      return


def starts_again(code: int, progress: bool) -> bool:
  """Whether another start is of use; the batch script has the same rule in bash.

  Args:
    code: that the run ended with.
    progress: it left a newer checkpoint than it found.
  """
  return code in STARTED_AGAIN or (code not in NOT_STARTED_AGAIN and progress)


def newest(workdir: Path) -> int | None:
  """The step of the newest checkpoint."""
  found = (p.name for p in workdir.glob("checkpoints/*"))
  return max((int(name) for name in found if name.isdecimal()), default=None)


def _preflight(run: Run, job: str, task: int, stop: threading.Event) -> int:
  output = log_file(run, job, task, "batch")
  process = _start(run, task, "jaxscale.cli.doctor", output, {})
  return 2 if _wait([process], stop) else 0


def _once(run: Run, job: str, task: int, stop: threading.Event) -> int:
  """Start all processes and wait for their end; the exit code of `_wait`."""
  count, coordinator = run.processes, f"127.0.0.1:{_free_port()}"
  processes = []
  for rank in range(count):
    variables = {
      "JAXSCALE_COORDINATOR": coordinator,
      "JAXSCALE_NUM_PROCESSES": str(count),
      "JAXSCALE_PROCESS_ID": str(rank),
    }
    output = log_file(run, job, task, rank)
    variables = variables if count > 1 else {}
    processes.append(_start(run, task, "jaxscale.train", output, variables))
  return _wait(processes, stop)


def _start(
  run: Run, task: int, module: str, output: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
  ours = ("SLURM_", "JAXSCALE_COORDINATOR", "JAXSCALE_NUM_", "JAXSCALE_PROCESS_")
  inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
  command = [
    *("bash", f"{run.folder}/process.sh", module, "--config", spec.config(run)),
    *spec.options(spec.settings_of(run, task)),
    *("--workdir", str(spec.workdir(run, task))),
  ]
  with output.open("a") as file:
    process = subprocess.Popen(
      command, cwd=run.cwd, env=inherited | dict(variables), stdin=subprocess.DEVNULL,
      stdout=file, stderr=subprocess.STDOUT,
    )  # fmt: skip
  line = {"pid": process.pid, "born": _born(process.pid), "host": socket.gethostname()}
  folders.append(Path(run.folder, "processes.jsonl"), line)
  return process


def _wait(processes: Sequence[subprocess.Popen[bytes]], stop: threading.Event) -> int:
  """As `srun --kill-on-bad-exit`: one that fails, or a wish to stop, ends all.

  Returns:
    0, or how the first ended that failed: the others were told to.
  """
  deadline, first = None, 0
  while None in (codes := [p.poll() for p in processes]):
    first = first or _worst(codes)
    if deadline is None and (stop.is_set() or first):
      deadline = time.monotonic() + GRACE_S
      _signal(processes, signal.SIGTERM)
    elif deadline is not None and time.monotonic() > deadline:
      _signal(processes, signal.SIGKILL)
    time.sleep(_POLL_S)
  return first or _worst(codes)


def _worst(codes: Sequence[int | None]) -> int:
  """The highest code of those that have ended, signals as a shell has them."""
  return max((128 - c if c < 0 else c for c in codes if c is not None), default=0)


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
  for process in processes:
    process.send_signal(number)  # nothing, where it has ended


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def log_file(run: Run, job: str, task: int, rank: int | str) -> Path:
  """What a process printed; `rank` is "batch" for the script or supervisor."""
  name = f"{job}_{task}" if run.trials else job
  return Path(run.folder, "logs", f"{name}.{rank}.out")


def main(argv: list[str]) -> None:
  """Detach from whoever submits, and supervise."""
  folder, job, *tasks = argv
  after = None
  if tasks[-1].startswith("--after="):
    after = Path(tasks.pop().removeprefix("--after="))
  run = folders.read_run(Path(folder))
  if os.fork():
    os._exit(0)
  os.setsid()
  line = {"pid": os.getpid(), "born": _born(os.getpid()), "host": socket.gethostname()}
  folders.append(Path(folder, "supervisor.jsonl"), line)
  output = os.open(
    Path(folder, "logs", f"{job}.batch.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
  )
  for stream in (1, 2):
    os.dup2(output, stream)
  supervise(run, job, [int(t) for t in tasks], after)


if __name__ == "__main__":
  main(sys.argv[1:])
