"""The executor `local`: runs in the background of this machine, without Slurm.

A supervisor, detached from the terminal, does the work of Slurm and the sbatch script: it
starts the processes of a trial, ends all of them when one fails, restarts them if that may
help, records the events, and runs several trials of a sweep at the same time. The
supervisor and the processes use the copy of the code in the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote
from typing import Any

from jaxscale import files
from jaxscale.cluster import local_launch
from jaxscale.cluster.schedulers import SCHEDULERS
from jaxscale.errors import EXIT_USER, ConfigError, invalid
from jaxscale.jobs import folder as folders
from jaxscale.jobs import logs
from jaxscale.jobs import spec as specs
from jaxscale.jobs.spec import JobSpec, QueueEntry

SCRIPT = "process.sh"
_POLL_S = 0.1
_Process = subprocess.Popen[Any]


def is_available() -> bool:
  """Return True: every machine can run processes."""
  return True


def render(spec: JobSpec) -> str:
  """Render the script of each process, `bash process.sh MODULE WORDS …`.

  Raises:
    ConfigError: the spec has an option that only Slurm supports.
  """
  if spec.spares:
    raise ConfigError(f"--spares={spec.spares}: spare nodes need Slurm; remove the option")
  if spec.site.container and spec.site.container.kind == "pyxis":
    raise ConfigError("Site.container.kind='pyxis': needs Slurm; use 'apptainer' on this machine")
  python = " ".join(map(quote, specs.python_command(spec)))
  head = f"#!/bin/bash\n# A process of {spec.name}, started by the local executor.\n"
  return f'{head}{specs.setup_script(spec)}\nexec {python} -m "$@"\n'


def submit(spec: JobSpec, tasks: Sequence[int] | None, after: Path | None) -> str:
  """Start the supervisor of a run, which first waits for the run in folder `after`.

  Raises:
    ConfigError: the supervisor does not start.
  """
  job = f"local-{time.time_ns() // 1_000_000}"
  # `-m` would warn about a module that its package has already imported.
  start = "import sys; from jaxscale.jobs import local_executor; local_executor.main(sys.argv[1:])"
  command = [sys.executable, "-c", start, spec.folder, job]
  command += [str(after or ""), *map(str, spec.tasks if tasks is None else tasks)]
  env = {**os.environ, "PYTHONPATH": f"{spec.folder}/code", "PYTHONSAFEPATH": "1"}
  done = subprocess.run(command, env=env, cwd=spec.cwd, input="", capture_output=True, text=True)
  if done.returncode:
    lines = done.stderr.strip().splitlines() or ["the supervisor did not start"]
    raise ConfigError(f"{spec.folder}: {lines[-1]}")
  return job


def queue(runs: Mapping[str, JobSpec]) -> dict[str, QueueEntry]:
  """Return the running and waiting tasks of jobs whose supervisor is alive."""
  entries = {}
  for job, spec in runs.items():
    for task in spec.tasks if is_alive(Path(spec.folder)) else ():
      last = folders.last_event(spec, job, task)
      if last.get("next") != "stop":
        entries[spec.task_id(job, task)] = QueueEntry("RUNNING" if last else "PENDING")
  return entries


def cancel(spec: JobSpec, job: str) -> None:
  """End all processes of a job: SIGTERM, and SIGKILL after the grace period.

  If the supervisor is dead but its processes are alive, they get SIGKILL at once.
  """
  folder = Path(spec.folder)
  supervisors = _recorded(folder, "supervisor.jsonl")
  for pid, born in supervisors[-1:] or _recorded(folder, "processes.jsonl"):
    try:
      _send(signal.SIGTERM if supervisors else signal.SIGKILL, pid, born, folder)
    except ProcessLookupError:  # It has ended.
      continue
    except PermissionError:
      raise invalid(spec.name, ..., f"has process {pid} of another user", "ask them") from None


def is_alive(folder: Path) -> bool:
  """Return whether the supervisor of the last submission runs on this machine."""
  return any(_names(_words(pid), folder) for pid, _ in _recorded(folder, "supervisor.jsonl"))


def _recorded(folder: Path, file: str) -> list[tuple[int, int]]:
  """Return ID and start of the recorded processes that still run on this machine."""
  lines = files.read_json_lines(folder / file, None, {"pid": int, "born": int, "host": str})
  own = [x for x in lines if x["host"] == socket.gethostname() and x["pid"] > 1]
  # A process that is just ending has no command line, but for a moment still its start.
  return [(x["pid"], x["born"]) for x in own if _born(x["pid"]) == x["born"] and _words(x["pid"])]


def _words(pid: int) -> list[str]:
  """Return the command line of a process; [] if it is ending or has ended."""
  return [word for word in files.readable_text(Path(f"/proc/{pid}/cmdline")).split("\0") if word]


def _names(words: Sequence[str], folder: Path) -> bool:
  """Return whether a word of a command line is the folder of a run or in it."""
  real = os.path.realpath(folder)
  paths = (Path(os.path.realpath(word)) for word in words if word[:1] == "/")
  return any(path.is_relative_to(real) for path in paths)


def _send(number: int, pid: int, born: int, folder: Path) -> None:
  """Send a signal to a process of a run.

  Raises:
    ConfigError: the process is not of this run, so the file that names it is wrong.
    OSError: the process has ended, or belongs to another user.
  """
  # The descriptor refers to this process, even if its ID is used again after the checks.
  with _descriptor(pid) as process:
    if _born(pid) != born or not (words := _words(pid)):
      return
    if not _names(words, folder):
      problem = f"records process {pid}, whose command line does not name it"
      raise invalid(str(folder), ..., problem, f"end it by `kill {pid}` if it is of this run")
    if process is None:
      os.kill(pid, number)
    else:
      signal.pidfd_send_signal(process, number)


@contextlib.contextmanager
def _descriptor(pid: int) -> Iterator[int | None]:
  """Open a process; None on systems that cannot."""
  try:
    process = os.pidfd_open(pid)
  except (AttributeError, OSError) as e:  # macOS; Linux before 5.3, and some sandboxes
    if isinstance(e, ProcessLookupError):
      raise
    yield None
    return
  try:
    yield process
  finally:
    os.close(process)


def _record_process(path: Path, pid: int) -> None:
  _record(path, {"pid": pid, "born": _born(pid), "host": socket.gethostname()})


def _record(path: Path, line: Mapping[str, Any]) -> None:
  """Append a line; a full disk must not end a supervisor with running processes."""
  try:
    files.append_json_line(path, line)
  except OSError as e:
    with contextlib.suppress(OSError):
      print(f"{path}: {e.strerror}; lost: {json.dumps(line)}", flush=True)


def _born(pid: int) -> int | None:
  """Return the start of a process in clock ticks since boot, as process IDs are reused.

  The value is field 22 of /proc/PID/stat, counted after the name in brackets (proc(5)).
  Return None if the process has ended or is a zombie.
  """
  try:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  return None if fields[0] == "Z" else int(fields[19])


def supervise(spec: JobSpec, job: str, tasks: Sequence[int], after: str = "") -> None:
  """Run trials, several at the same time, until all have ended or SIGTERM arrives.

  Args:
    spec: the run.
    job: the number of the job.
    tasks: the trials.
    after: the folder of a run that must end first; empty: none.
  """
  stop = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: stop.set())
  while after and is_alive(Path(after)) and not stop.is_set():
    time.sleep(_POLL_S)
  with ThreadPoolExecutor(spec.at_most or len(tasks)) as pool:
    trials = [pool.submit(_run_trial, spec, job, task, stop) for task in tasks]
    while not all(t.done() for t in trials):  # polls, because a lock would delay signals
      time.sleep(_POLL_S)
  for trial in trials:
    trial.result()


def _run_trial(spec: JobSpec, job: str, task: int, stop: threading.Event) -> None:
  """Run a trial, and restart it as long as that may help."""
  for restarts in range(spec.requeue + 1):
    if stop.is_set():
      return
    event = {"event": "start", "job": job, "restarts": restarts}
    event |= {"nodes": 1, "hosts": socket.gethostname(), "code": 0, "next": ""}
    _record(spec.events_file(task), event | {"time": round(time.time())})
    before = newest_step(spec.workdir(task))
    code = _run_once(spec, job, task, stop)
    progress = newest_step(spec.workdir(task)) != before
    again = restarts < spec.requeue and not stop.is_set() and specs.is_restarted(code, progress)
    event |= {"event": "end", "code": code, "next": "requeue" if again else "stop"}
    _record(spec.events_file(task), event | {"time": round(time.time())})
    if not again:
      return


def newest_step(workdir: Path) -> int | None:
  """Return the step of the newest checkpoint."""
  steps = [files.whole_number(p.name) for p in workdir.glob("checkpoints/*")]
  copy = files.read_json(workdir / "checkpoints" / "local.json", {"step": int})
  steps.append(copy.get("step"))  # of copies on the nodes (checkpoint/node_copies.py)
  return max((step for step in steps if step is not None), default=None)


def _run_once(spec: JobSpec, job: str, task: int, stop: threading.Event) -> int:
  """Check the machine if requested and run all processes; return their exit code."""

  ours = ("JAXSCALE_COORDINATOR", "JAXSCALE_NUM_", "JAXSCALE_PROCESS_")
  ours += tuple(scheduler.PREFIX for scheduler in SCHEDULERS.values())
  inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
  trial = specs.as_options(spec.trials[task]) if spec.trials else []
  settings = [*spec.train_options(), *trial, "--workdir", str(spec.workdir(task))]

  def start(command: str, rank: int | str, variables: Mapping[str, str]) -> _Process:
    words = ["bash", f"{spec.folder}/{SCRIPT}", *command.split(), *settings]
    env = {**inherited, **variables}
    options: dict[str, Any] = dict(cwd=spec.cwd, env=env, stdin=subprocess.DEVNULL)
    with open(files.open_to_append(spec.log_file(job, task, rank)), "a") as file:
      process = subprocess.Popen(words, **options, stdout=file, stderr=subprocess.STDOUT)
    _record_process(Path(spec.folder, "processes.jsonl"), process.pid)
    return process

  if spec.preflight and local_launch.wait([start("jaxscale doctor", "batch", {})], stop)[0]:
    return EXIT_USER
  own = enumerate(local_launch.variables(spec.processes))
  started = [start("jaxscale.train", rank, env) for rank, env in own]
  code, rank = local_launch.wait(started, stop, specs.ASKED_CODES)
  if rank is not None:
    last = "".join(logs.last([("", spec.log_file(job, task, rank))], 1))
    line = f"error: process {rank} failed first (exit code {code}): {last}\n"
    batch = spec.log_file(job, task, "batch")
    with contextlib.suppress(OSError), open(files.open_to_append(batch), "a") as file:
      file.write(line)
  return code


def main(argv: list[str]) -> None:
  """Detach from the submitting process and supervise the run."""
  folder, job, after, *tasks = argv
  spec = folders.read_spec(Path(folder))
  if os.fork():
    os._exit(0)
  os.setsid()
  _record_process(Path(folder, "supervisor.jsonl"), os.getpid())
  with open(files.open_to_append(Path(folder, "logs", f"{job}.batch.out")), "a") as output:
    for stream in (1, 2):
      os.dup2(output.fileno(), stream)
  supervise(spec, job, [int(t) for t in tasks], after)
