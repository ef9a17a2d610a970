"""Submitting runs, from a notebook or the command line, and what comes back."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jaxscale.config
from jaxscale.config import Config, Phases
from jaxscale.config.loading import load_config, override
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.launch import folder as folders
from jaxscale.launch import local, logs, slurm, spec, sweeps
from jaxscale.launch import status as states
from jaxscale.launch.profile import load_site, with_options
from jaxscale.launch.render import render, render_process
from jaxscale.launch.spec import Run
from jaxscale.launch.table import Record
from jaxscale.metrics import read_json_lines

EXECUTORS = ("slurm", "local")


class Prepared(NamedTuple):
  """A run that is checked and not made yet.

  Attributes:
    run: what was asked for.
    config: `FILE[:arg]` as it was given.
    text: of the config, where it was given as an object.
  """

  run: Run
  config: str
  text: str | None

  @property
  def script(self) -> str:
    """What the executor will be given."""
    return (
      render(self.run) if self.run.executor == "slurm" else render_process(self.run)
    )


def prepare(
  config: str | Config,
  *,
  trials: Sequence[Mapping[str, str]] = (),
  at_most: int = 0,
  nodes: int = 1,
  spares: int = 0,
  name: str | None = None,
  overrides: Mapping[str, Any] | None = None,
  site: str | None = None,
  executor: str | None = None,
  requeue: int = 10,
  preflight: bool = False,
  runs: str = "runs",
  made_by: str | None = None,
  **options: Any,
) -> Prepared:
  """Check all that can be checked here; makes nothing. See `submit`."""
  overrides = {k: sweeps.as_text(v) for k, v in (overrides or {}).items()}
  path, text = (config, None) if isinstance(config, str) else _written(config)
  for option, value, least in (
    ("nodes", nodes, 1), ("spares", spares, 0), ("requeue", requeue, 0),
    ("at-most", at_most, 0),
  ):  # fmt: skip
    if not isinstance(value, int) or value < least:
      raise ConfigError(f"--{option}={value}: give a whole number >= {least}")
  chosen = executor or ("slurm" if slurm.is_here() else "local")
  if chosen not in EXECUTORS:
    raise ConfigError(f"--executor={chosen}: {nearest(chosen, EXECUTORS)}")
  if spares and chosen == "local":
    raise ConfigError(f"--spares={spares}: this machine is one node, leave it out")
  chosen_site = with_options(load_site(site), options)
  load = _dividing(loader(config), nodes * chosen_site.tasks)
  load(overrides)
  if trials:
    sweeps.check(load, overrides, trials)
  if not (chosen_site.python or chosen_site.container or find_spec("jax")):
    raise ConfigError(
      f"{sys.executable}: has no jax; submit from the environment that trains, or "
      "name its interpreter by --python or in the site's profile"
    )
  folder = folders.new_folder(runs, name, path)
  run = Run(
    name=folder.name,
    folder=str(folder),
    cwd=str(Path.cwd()),
    config=folders.place_of(path) if text is None else "code/config/notebook.py",
    overrides=overrides,
    trials=tuple(dict(t) for t in trials),
    at_most=at_most or (1 if chosen == "local" else 0),
    nodes=nodes,
    site=chosen_site,
    requeue=requeue,
    preflight=preflight,
    executor=chosen,
    python=sys.executable,
    made_by=made_by or "jaxscale.launch.submit",
    spares=spares,
  )
  prepared = Prepared(run, path, text)
  _ = prepared.script  # it refuses what cannot be written into one
  return prepared


def _dividing(
  load: Callable[[Mapping[str, str]], Config], processes: int
) -> Callable[[Mapping[str, str]], Config]:
  """Refuses here what every process would refuse later; devices are not known yet."""

  def checked(overrides: Mapping[str, str]) -> Config:
    config = load(overrides)
    phases = config.phases
    sizes = phases.batch_sizes if isinstance(phases, Phases) else ()
    for size in sizes or (config.batch_size,):
      if over := size % processes:
        near = [n for n in (size - over, size - over + processes) if n]
        raise ConfigError(
          f"batch size {size}: not divisible by {processes} processes; give "
          f"{' or '.join(map(str, near))}, or another number of nodes"
        )
    return config

  return checked


def loader(config: str | Config) -> Callable[[Mapping[str, str]], Config]:
  """What makes the config, with overrides as text."""
  if isinstance(config, str):
    return lambda overrides: load_config(config, overrides)
  return lambda overrides: override(config, overrides)


def _written(config: Config) -> tuple[str, str]:
  """A name for a config that is an object, and the file that makes it again."""
  if not isinstance(config, Config):
    raise ConfigError(f"{type(config).__name__}: give a path or a Config")
  text = (
    '"""The config that was given as an object."""\n\n'
    "from jaxscale.config import *\n\n\n"
    f"def get_config() -> Config:\n  return {config!r}\n"
  )
  names: dict[str, Any] = dict(vars(jaxscale.config))
  try:
    same = eval(repr(config), names) == config
  except Exception:
    same = False
  if not same:
    raise ConfigError("Config: cannot be written to a file, give the path of one")
  return "notebook.py", text


def launch(prepared: Prepared, after: Job | None = None) -> Job:
  """Make the folder and hand the run to its executor.

  Args:
    prepared: the run.
    after: on this machine, the run that is to have ended before; Slurm has its own
      queue, and nodes for several.

  Raises:
    ConfigError: the folder cannot be made, or the executor refuses; what was made is
      removed then.
  """
  run = prepared.run
  folders.make(run, prepared.config, prepared.text)
  job = Job(Path(run.folder))
  try:
    _hand_over(run, after=after)
  except ConfigError:
    shutil.rmtree(run.folder)  # it is ours, and nothing ran in it
    raise
  return job


def _hand_over(
  run: Run, tasks: Sequence[int] | None = None, after: Job | None = None
) -> None:
  if run.executor == "slurm":
    number = slurm.submit(run, tasks)
  else:
    number = local.submit(run, tasks, after.folder if after else None)
  folders.submitted(Path(run.folder), number, run.executor)


def submit(config: str | Config, **options: Any) -> Job:
  """Submit one run.

  Args:
    config: `FILE[:arg]`, or a Config.
    options: `nodes`; `spares`, nodes beyond them; `name` of the folder; `overrides`
      by dotted field; `site`, a profile; `executor`, "slurm" or "local" (default:
      Slurm where sbatch is); `requeue`, how often it may start again; `preflight`;
      `runs`, the directory of all runs; and any of `profile.OPTIONS`, as
      time="24:00:00".

  Raises:
    ConfigError: something cannot be; nothing was submitted.

  Example:
    >>> job = submit("configs/digits.py", nodes=4)            # doctest: +SKIP
    >>> job.wait(), job.metrics()[-1]["eval/accuracy"] > 0.97  # doctest: +SKIP
  """
  return launch(prepare(config, **options))


def sweep(
  config: str | Config,
  trials: Sequence[Mapping[str, Any]] | None = None,
  *,
  at_most: int = 0,
  **options: Any,
) -> Job:
  """Submit a sweep: one array of jobs, or one queue of this machine.

  Args:
    config: as for `submit`.
    trials: settings of each trial by dotted field; None: what `get_sweep()` of the
      config file yields.
    at_most: trials that run at a time; 0: as many as there is room for (on this
      machine one).
    options: as for `submit`.

  Raises:
    ConfigError: as for `submit`.
  """
  if trials is None:
    if not isinstance(config, str):
      raise ConfigError("trials: give them, or a config file that has get_sweep()")
    texts = sweeps.from_file(config)
  else:
    texts = [{k: sweeps.as_text(v) for k, v in trial.items()} for trial in trials]
  if not texts:
    raise ConfigError("the sweep has no trials")
  return launch(prepare(config, trials=texts, at_most=at_most, **options))


def job(name: str, runs: str = "runs") -> Job:
  """The handle of a run that was submitted before, by whomever.

  Args:
    name: of the run, or the path of its folder.
    runs: the directory of all runs.

  Raises:
    ConfigError: there is no such run.

  Example:
    >>> job("digits-20261121-101500").status()                # doctest: +SKIP
  """
  return Job(folders.find(name, runs))


class Job(NamedTuple):
  """A run that was submitted, known by its folder.

  Attributes:
    folder: of the run.
  """

  folder: Path

  @property
  def name(self) -> str:
    """Of the run; `launch.job(name)` gives this handle again."""
    return self.folder.name

  def status(self) -> Rows:
    """A row for the run, or for each trial of a sweep."""
    return Rows(states.rows([self.folder]))

  def metrics(self, task: int | None = None) -> Record:
    """The record: a list of a dict a logged step, shown as a table.

    `pandas.DataFrame(job.metrics())` makes a data frame of it.

    Args:
      task: of a sweep; None: all, told apart by the column "task".

    Raises:
      ConfigError: there is no such trial.
    """
    run = folders.read_run(self.folder)
    if task is not None and task not in run.tasks:
      raise ConfigError(f"task={task}: give 0 … {len(run.tasks) - 1}")
    found = Record()
    for i in run.tasks if task is None else [task]:
      steps: dict[int, dict[str, Any]] = {}
      for line in read_json_lines(spec.workdir(run, i) / "metrics.jsonl"):
        head = {"task": i} if run.trials else {}
        steps.setdefault(line["step"], head).update(line)
      found.extend(steps[step] for step in sorted(steps))
    return found

  def logs(self, rank: int | str = 0, task: int = 0, lines: int | None = None) -> str:
    """What a process printed; `rank` may be "all", or "batch" for the script."""
    files = logs.choose(folders.read_run(self.folder), str(rank), task)
    return "\n".join(logs.last(files, lines))

  def cancel(self) -> bool:
    """End it; what runs is told to save first, and has Slurm's KillWait for that.

    Returns:
      False: it had ended, and nothing was done. What is LOST may have left something.
    """
    job, now = folders.last_job(self.folder), self.status()
    if all(row.ended and row.state != "LOST" for row in now):
      return False
    (self.folder / "cancelled").touch()  # the script is not to start it again
    if folders.read_run(self.folder).executor == "local":
      local.cancel(self.folder)
    elif job and not all(row.ended for row in now):
      slurm.cancel([job])
    return True

  def resume(
    self, *, nodes: int | None = None, spares: int | None = None, **options: Any
  ) -> Job:
    """Submit the same folder again; it goes on from its last checkpoint.

    Of a sweep, the trials that are not done.

    Args:
      nodes: another number of them.
      spares: another number of nodes beyond those.
      options: other values of any of `profile.OPTIONS`.

    Raises:
      ConfigError: it still runs, or is done.
    """
    run, now = folders.read_run(self.folder), self.status()
    if active := [row for row in now if not row.ended]:
      raise ConfigError(
        f"{run.name}: {active[0].job} is {active[0].state}; `cancel {run.name}` first"
      )
    tasks = [i for i, row in enumerate(now) if row.state != "COMPLETED"]
    if not tasks:
      raise ConfigError(f"{run.name}: is done; there is nothing to go on with")
    site = with_options(run.site, options)
    run = run._replace(
      site=site,
      nodes=run.nodes if nodes is None else nodes,
      spares=run.spares if spares is None else spares,
    )
    if run.nodes < 1:
      raise ConfigError(f"--nodes={run.nodes}: give a whole number >= 1")
    if run.spares < 0 or (run.spares and run.executor == "local"):
      raise ConfigError(f"--spares={run.spares}: only Slurm has some, give 0 or more")
    folders.write_scripts(run)
    (self.folder / "cancelled").unlink(missing_ok=True)
    _hand_over(run, tasks if run.trials else None)
    return self

  def wait(self, timeout_s: float | None = None, every_s: float = 2.0) -> Rows:
    """Wait until nothing more happens by itself; returns the last `status`.

    Raises:
      TimeoutError: it has not ended in so many seconds.
    """
    return wait(self.status, self.name, timeout_s, every_s)


def wait(
  status: Callable[[], Rows], name: str, timeout_s: float | None, every_s: float
) -> Rows:
  """Ask for a status until all of it has ended; see `Job.wait`."""
  began = time.monotonic()
  while True:
    now = status()
    if all(row.ended for row in now):
      return now
    if timeout_s is not None and time.monotonic() - began > timeout_s:
      raise TimeoutError(f"{name}: not ended in {timeout_s} s\n{now}")
    time.sleep(every_s)


class Rows(list[states.Row]):
  """Rows of a status, shown as a table."""

  def __repr__(self) -> str:
    return states.table(self)

  __str__ = __repr__

  def _repr_html_(self) -> str:
    return states.html(self)


def command_line(argv: Sequence[str]) -> str:
  """The command that was typed, for the script's first line."""
  return shlex.join(["python", "-m", "jaxscale.launch", *argv])
