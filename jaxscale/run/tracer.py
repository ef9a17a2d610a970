"""Traces of a run's steps by JAX's profiler, planned ones and requested ones.

`Log.profile` selects steps before the run; `jaxscale profile RUN` requests a trace during
training (`trace_request`). Each process acts on its own, without collectives: processes
that trace different steps produce different traces, but cannot deadlock. The overhead is
paid by the process that traces, and by those that wait for it in the next step. No error
in this module ends a run.

    WORKDIR/profile/plugins/profile/steps_100-110/process_0.xplane.pb
                                                  process_0.trace.json.gz

Host activities are named as in the watch ("input", "step"), and "evaluation", "saving" and
"check" (`run.hooks`). Device activities are named by the scopes of `training.step`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

import jax

from jaxscale.config.running import Log
from jaxscale.errors import message_of, printable
from jaxscale.files import replace_text
from jaxscale.metrics.log import logger
from jaxscale.run import trace_request
from jaxscale.run.trace_request import process_file, session_folder

# Each process looks for requests once a second. All processes of a large run together look
# at most a hundred times a second, as each look is one request to the file server.
_POLL_S, _POLLS_PER_S = 1.0, 100
_SUFFIXES = (".trace.json.gz", ".xplane.pb")  # `jaxscale profile` waits for the last one.


class Tracer(contextlib.AbstractContextManager["Tracer"]):
  """Tracer of one process."""

  def __init__(self, workdir: Path, log: Log):
    """Create a tracer; tracing starts at the first `is_due` that returns True."""
    self._workdir, self._log = workdir, log
    self._plan = f"log.profile={log.profile}"
    self._rank, self._count = jax.process_index(), jax.process_count()
    self._planned = log.profiled_steps() if self._rank in log.profile_processes else None
    self._poll_s, self._next_poll = max(_POLL_S, self._count / _POLLS_PER_S), 0.0
    self._answered = ""  # the name of the last request
    self._next = "", 0  # the name and number of steps of the trace that is due
    self._is_on, self._left, self._first, self._step = False, 0, 0, 0
    self._target = self._scratch = workdir
    self._unwritten: Path | None = None  # a trace that the profiler still holds
    self._in_step, self._in_part = contextlib.ExitStack(), contextlib.ExitStack()

  def __exit__(self, error, *_):
    self.finish()
    if self._planned and self._step < self._planned[0] and error is None:
      self._log_line(f"{self._plan}: the run ended after step {self._step}; no trace")

  def check_plan(self, total_steps: int) -> None:
    """Report steps and processes in `log.profile` that the run does not have."""
    log = self._log
    missing = [p for p in log.profile_processes if p >= self._count]
    if log.profile and missing and self._rank == 0:
      have = f"the run has processes 0 to {self._count - 1}"
      logger.warning(f"log.profile_processes={log.profile_processes}: {have}")
    if self._planned and self._planned[0] > total_steps:
      self._log_line(f"{self._plan}: the run has {total_steps} steps; no trace")
      self._planned = None

  def is_due(self, step: int) -> bool:
    """Return whether a trace begins or ends before this step; called once per step."""
    self._step = step
    if self._is_on:
      self._left -= 1
      return self._left < 0
    if self._planned and self._planned[0] <= step <= self._planned[1]:
      last, self._planned = self._planned[1], None
      self._next = f"steps_{step}-{last}", last - step + 1
      return True
    if (now := time.monotonic()) < self._next_poll:
      return False
    self._next_poll = now + self._poll_s
    asked = trace_request.read(self._workdir)
    if not asked or asked.name == self._answered or self._rank not in asked.processes:
      return False
    self._answered, self._next = asked.name, (asked.name, asked.steps)
    folder = session_folder(self._workdir, asked.name)
    return not process_file(folder, self._rank).exists()  # Written before a restart.

  @property
  def is_complete(self) -> bool:
    """Return whether a trace has all of its steps and waits to be ended."""
    return self._is_on and self._left <= 0

  def turn(self, step: int) -> None:
    """End a trace, or begin one at this step; no step may be in flight."""
    if self._is_on:
      self.finish()
    else:
      self._begin(step, *self._next)

  def at(self, step: int, activity: str) -> None:
    """Name the host's next activity in the trace, if there is one."""
    if not self._is_on:
      return
    self._in_part.close()
    if activity != "step":
      self._in_step.close()
    if activity == "input":
      self._in_step.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))
    if activity in ("input", "step"):
      self._in_part.enter_context(jax.profiler.TraceAnnotation(activity))

  def finish(self) -> None:
    """End the trace, if there is one, and move it to its folder."""
    if not self._is_on:
      return
    self.at(self._step, "")
    self._is_on = False
    last = self._step - (self._left < 0)
    try:
      self._unwritten = self._scratch
      jax.profiler.stop_trace()
      self._unwritten = None
      self._keep()
    except Exception as e:  # JAX's errors share no class, and none may end a run.
      self._failed(e)
    else:
      folder = self._workdir / trace_request.FOLDER
      self._log_line(f"traced steps {self._first} to {last}: `xprof --logdir {folder}`")
    finally:
      shutil.rmtree(self._scratch, ignore_errors=True)

  def _begin(self, step: int, name: str, steps: int) -> None:
    self._target = session_folder(self._workdir, name)
    self._scratch = self._workdir / trace_request.FOLDER / f".{secrets.token_hex(8)}.tmp"
    self._first, self._left = step, steps - 1
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Tracing every Python call is slow and large.
    try:
      self._scratch.mkdir(parents=True)
      if self._unwritten:  # The profiler of jax 0.10 starts no trace before this is written.
        with contextlib.suppress(RuntimeError):  # The profiler of jax 0.12 has dropped it.
          jax.profiler.stop_trace()
        shutil.rmtree(self._unwritten, ignore_errors=True)
        self._unwritten = None
      jax.profiler.start_trace(self._scratch, profiler_options=options)
      self._is_on = True
    except Exception as e:  # The user may already be tracing the whole program.
      shutil.rmtree(self._scratch, ignore_errors=True)
      self._failed(e)

  def _keep(self) -> None:
    """Move the profiler's files to the trace's folder, each atomically."""
    self._target.mkdir(parents=True, exist_ok=True)
    for suffix in _SUFFIXES:
      (file,) = self._scratch.glob(f"plugins/profile/*/*{suffix}")
      os.replace(file, process_file(self._target, self._rank, suffix))

  def _failed(self, error: Exception) -> None:
    what = message_of(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
      what = f"{error.filename or self._target}: {error.strerror}"
    line = f"step {self._first}  no trace: {printable(what)[:300]}"
    with contextlib.suppress(OSError):  # `jaxscale profile` shows this line.
      self._target.mkdir(parents=True, exist_ok=True)
      replace_text(process_file(self._target, self._rank, ".error"), f"{line}\n")
    self._log_line(line)

  def _log_line(self, line: str) -> None:
    if self._rank == 0:
      logger.info(line)
    else:
      print(printable(f"process {self._rank}: {line}"), flush=True)
