"""Submission of runs from a notebook or the command line, and handles of runs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.cluster import local_launch
from jaxscale.config import Config, Phases
from jaxscale.config.choice import chosen, is_built_in
from jaxscale.config.config_file import check_not_loading
from jaxscale.config.loading import load_config, override, recorded_run
from jaxscale.config.packaged import locate
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import append_json_line, open_to_append, write_json
from jaxscale.jobs import folder as folders
from jaxscale.jobs import logs, sweeps
from jaxscale.jobs.executors import EXECUTORS, choose
from jaxscale.jobs.site import load_site, with_options
from jaxscale.jobs.spec import JobSpec
from jaxscale.jobs.status import ShownAsTable, StatusTable, statuses
from jaxscale.metrics import read_metrics, text
from jaxscale.owners import unsafe_owner
from jaxscale.planning.stored import FILE, read_plan

_SHOWN = 20  # rows of a record; the middle of a longer one is hidden
_NOTEBOOK_CONFIG = '''\
"""Config that was submitted as an object."""

from jaxscale.config import *


def get_config() -> Config:
  return {config!r}
'''


class Prepared(NamedTuple):
  """A checked run before its submission.

  Attributes:
    spec: the run.
    config: the user's `FILE[:arg]`.
    source: the source of a config that is an object; else None.
    script: the script that the executor will run.
    plan: the plan of the run, written to plan.json in its workdir; None if it has none.
  """

  spec: JobSpec
  config: str
  source: str | None
  script: str
  plan: dict[str, Any] | None = None


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
  made_by: str = "jaxscale.jobs.submit",
  plan: str | Path | None = None,
  trust: bool = False,
  **options: Any,
) -> Prepared:
  """Check a run as far as possible before its submission; see `submit`."""
  executor = choose(executor)
  planned = read_plan(Path(plan)) if plan else None
  _check_counts(nodes, spares=spares, requeue=requeue, at_most=at_most)
  chosen = with_options(load_site(site), options)
  if executor == "local" and nodes == 1 and not (chosen.tasks_per_node or chosen.gpus_per_node):
    env = os.environ | dict(pair.split("=", 1) for pair in chosen.env)
    chosen = dataclasses.replace(chosen, tasks_per_node=local_launch.choose_count(None, env))
  texts = sweeps.as_texts(overrides or {})
  path, source = _path_and_source(config, trust)
  load = checked_loader(config, nodes * chosen.tasks, trust)
  load(texts)
  if trials:
    sweeps.check(load, texts, trials)
  if not (chosen.python or chosen.container or find_spec("jax")):
    advice = "submit from the environment that trains, or set its interpreter by "
    advice += "--python or in the site profile"
    raise ConfigError(f"{sys.executable}: has no jax; {advice}")
  folder = folders.new_folder(runs, name, path)
  config_file = "code/config/notebook.py" if source else folders.copied_path(path)
  where = dict(name=folder.name, folder=str(folder), cwd=str(Path.cwd()), config=config_file)
  size: dict[str, Any] = dict(nodes=nodes, spares=spares, requeue=requeue, preflight=preflight)
  spec = JobSpec(
    **where,
    **size,
    overrides=texts,
    trials=tuple(dict(t) for t in trials),
    at_most=at_most or (1 if executor == "local" else 0),
    site=chosen,
    executor=executor,
    python=sys.executable,
    made_by=made_by,
  )
  return Prepared(spec, path, source, EXECUTORS[executor].render(spec), planned)


MOST_NODES = 2**16  # as in Slurm's largest clusters; also limits trials and restarts


def _check_counts(nodes: int, **others: int) -> None:
  for name, value in {"nodes": nodes, **others}.items():
    least = int(name == "nodes")
    if not isinstance(value, int) or not least <= value <= MOST_NODES:
      option = f"--{name.replace('_', '-')}={value}"
      raise ConfigError(f"{option}: give a whole number in [{least}, {MOST_NODES}]")


def checked_loader(config: str | Config, processes: int = 1, trust: bool = False) -> sweeps.Loader:
  """Return a function that builds the config from overrides, as text by dotted field.

  The function raises ConfigError for batch sizes that are not divisible by the number of
  processes, which the run would otherwise refuse after its start.
  """

  def load(overrides: sweeps.Texts) -> Config:
    if isinstance(config, str):
      made = load_config(config, overrides, trust=trust)
    else:
      made = override(config, overrides)
    sizes = made.phases.batch_sizes if isinstance(made.phases, Phases) else ()
    for size in sizes or (made.batch_size,):
      if over := size % processes:
        near = filter(None, (size - over, size - over + processes))
        advice = f"use {text.listed(near, 'or')}, or a different number of nodes"
        raise ConfigError(f"batch size {size}: not divisible by {processes} processes; {advice}")
    return made

  return load


def _path_and_source(config: str | Config, trust: bool = False) -> tuple[str, str | None]:
  """Return a config's `FILE[:arg]`, and the source that rebuilds a config object."""
  if isinstance(config, str):
    if recorded_run(config) is None:
      return locate(config), None
    config = load_config(config, trust=trust)
  if not isinstance(config, Config):
    raise ConfigError(f"{type(config).__name__}: not a config; give a path or a Config")
  source, names = _NOTEBOOK_CONFIG.format(config=config), {}
  with contextlib.suppress(Exception):
    exec(source, names)
    if names["get_config"]() == config:
      return "notebook.py", source
  kinds = {type(x) for x in chosen(config)}
  own = {k.__name__ for k in kinds if not is_built_in(k) or hasattr(k, "as_plain")}
  problem = f"cannot be written to a file, since {text.listed(sorted(own)) or 'a value'} is "
  fix = "define it in a file with get_config, and submit that file"
  raise invalid("Config", ..., f"{problem}defined in this program only", fix)


def launch(prepared: Prepared, after: Job | None = None) -> Job:
  """Create the folder and submit the run.

  Args:
    prepared: the run.
    after: a run that must end first, for an executor without a queue.

  Raises:
    ConfigError: the folder cannot be created, or the executor refuses the run. The folder
      is then removed.
  """
  spec = prepared.spec
  script = EXECUTORS[spec.executor].SCRIPT, prepared.script
  folders.make(spec, script, prepared.config, prepared.source)
  try:
    with folders.one_line(spec.folder, "use a different --runs"):
      for task in spec.tasks if prepared.plan is not None else ():
        spec.workdir(task).mkdir(parents=True, exist_ok=True)
        write_json(spec.workdir(task) / FILE, prepared.plan)
      _submit(spec, None, after)
  except ConfigError:
    shutil.rmtree(spec.folder)  # the run has not started
    raise
  return Job(Path(spec.folder))


def _submit(spec: JobSpec, tasks: Sequence[int] | None, after: Job | None) -> None:
  number = EXECUTORS[spec.executor].submit(spec, tasks, after.folder if after else None)
  line = {"job": number, "executor": spec.executor, "time": round(time.time(), 3)}
  append_json_line(Path(spec.folder, "submissions.jsonl"), line | {"tasks": tasks})


def submit(config: str | Config, **options: Any) -> Job:
  """Submit one run.

  Args:
    config: the config, as `FILE[:arg]` or as an object.
    options: `nodes`, the number of nodes; `spares`, the number of additional nodes that
      replace lost ones; `name`, the name of the folder; `overrides`, settings by dotted
      field; `site`, a site profile; `executor`, "slurm" or "local" (default: Slurm if
      sbatch is installed); `requeue`, the largest number of restarts; `preflight`, whether
      to check the nodes first; `plan`, a file of `jaxscale plan` to compare the run with;
      `runs`, the directory of all runs; `trust`, whether to execute code of a run that others
      could have written; and any of `site.OPTIONS`, e.g. time="24:00:00".

  Raises:
    ConfigError: an option is invalid; nothing was submitted.

  Example:
    >>> job = submit("configs/digits.py", nodes=4)            # doctest: +SKIP
    >>> job.wait(), job.metrics()[-1]["eval/accuracy"] > 0.97  # doctest: +SKIP
  """
  check_not_loading("submits a job")
  return launch(prepare(config, **options))


def sweep(
  config: str | Config, trials: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> Job:
  """Submit a sweep: one job array on Slurm, or one queue on this machine.

  Args:
    config: the config; see `submit`.
    trials: the settings of each trial by dotted field; None means the result of `get_sweep()`
      in the config file.
    options: the options of `submit`, and `at_most`, the number of trials that run at the
      same time (0: no limit on Slurm, and one on this machine).

  Raises:
    ConfigError: an option is invalid; nothing was submitted.
  """
  if trials is not None:
    texts = [sweeps.as_texts(trial) for trial in trials]
  elif isinstance(config, str):
    texts = sweeps.from_file(config)
  else:
    raise ConfigError("trials: missing; pass them, or a config file with get_sweep()")
  if not texts:
    raise ConfigError("the sweep has no trials; give at least one")
  return launch(prepare(config, trials=texts, **options))


def job(name: str, runs: str = "runs") -> Job:
  """Return the handle of a run that was submitted before.

  Args:
    name: the name of the run, or the path of its folder.
    runs: the directory of all runs.

  Raises:
    ConfigError: the run does not exist.

  Example:
    >>> job("digits-20261121-101500").status()                # doctest: +SKIP
  """
  return Job(folders.find(name, runs))


class Job(NamedTuple):
  """A submitted run, identified by its folder."""

  folder: Path

  @property
  def name(self) -> str:
    """Name of the run; `jobs.job(name)` returns this handle again."""
    return self.folder.name

  def status(self) -> StatusTable:
    """Return the status of the run, or of each trial of a sweep."""
    return statuses([self.folder])

  def metrics(self, task: int | None = None) -> Record:
    """Return the logged metrics: one dict per logged step, shown as a table.

    `pandas.DataFrame(job.metrics())` converts them to a data frame.

    Args:
      task: a trial of a sweep; None means all trials, with a column "task".

    Raises:
      ConfigError: the trial does not exist.
    """
    spec = folders.read_spec(self.folder)
    if task is not None:
      spec.check_task(task)
    record = Record()
    for i in spec.tasks if task is None else [task]:
      steps = collections.defaultdict(lambda i=i: {"task": i} if spec.trials else {})
      for line in read_metrics(spec.workdir(i) / "metrics.jsonl"):
        steps[line["step"]].update(line)
      record.extend(steps[step] for step in sorted(steps))
    return record

  def logs(self, rank: int | str = 0, task: int = 0, lines: int | None = None) -> str:
    """Return the output of a process; `rank` may be "all", or "batch" for the script."""
    return "\n".join(logs.last(logs.choose(folders.read_spec(self.folder), str(rank), task), lines))

  def cancel(self) -> bool:
    """Cancel the job; running processes may save first, within Slurm's KillWait.

    Returns:
      False if the job had already ended. A LOST run may still have processes, which are
      ended.

    Raises:
      ConfigError: the run belongs to another user, or records a job or process of something
        else.
    """
    folders.require_own(self.folder, "have its owner cancel it")
    states = {r.state for r in self.status() if not r.ended or r.state == "LOST"}
    if not states:
      return False
    with folders.one_line(self.folder / "cancelled", "remove it, and cancel again"):
      os.close(open_to_append(self.folder / "cancelled"))  # keeps the script from a restart
    spec = folders.read_spec(self.folder)
    if states != {"LOST"} or spec.executor == "local":
      EXECUTORS[choose(spec.executor)].cancel(spec, folders.last_job(self.folder))
    return True

  def resume(
    self,
    *,
    nodes: int | None = None,
    spares: int | None = None,
    accept_changes: Collection[str] = (),
    trust: bool = False,
    **options: Any,
  ) -> Job:
    """Submit the run again; it resumes from its last checkpoint.

    A sweep resumes with the trials that are not done.

    Args:
      nodes: a new number of nodes; None keeps it.
      spares: a new number of spare nodes; None keeps it.
      accept_changes: the kinds of changes to accept in this job; see `fit`.
      trust: whether to execute the code in a folder that others could have written.
      options: new values of any of `site.OPTIONS`.

    Raises:
      ConfigError: the run is still active, or is done, or belongs to another user.
    """
    if not trust:
      fix = "have its owner resume it, or add --trust if you trust them"
      folders.require_own(self.folder, fix)
      with folders.one_line(self.folder / "code", "submit the run again"):
        others = unsafe_owner(self.folder / "code", group=False, is_folder=True)
      if others:
        raise invalid(str(self.folder), ..., f"has code that is executed, and {others}", fix)
    spec, now = folders.read_spec(self.folder), self.status()
    if active := [row for row in now if not row.ended]:
      is_active = f"{active[0].job} is {active[0].state}"
      raise ConfigError(f"{spec.name}: {is_active}; run `jaxscale cancel {spec.name}` first")
    tasks = [i for i, row in enumerate(now) if row.state != "COMPLETED"]
    if not tasks:
      raise ConfigError(f"{spec.name}: is done; there is nothing to resume")
    given = {"nodes": nodes, "spares": spares, "accept_changes": ",".join(accept_changes)}
    spec = spec._replace(**{k: v for k, v in given.items() if v is not None})
    _check_counts(spec.nodes, spares=spec.spares)
    spec = spec._replace(site=with_options(spec.site, options))
    executor = EXECUTORS[choose(spec.executor)]
    folders.write_spec(spec, (executor.SCRIPT, executor.render(spec)))
    (self.folder / "cancelled").unlink(missing_ok=True)
    _submit(spec, tasks if spec.trials else None, None)
    return self

  def wait(self, timeout_s: float | None = None, every_s: float = 2.0) -> StatusTable:
    """Wait until the job has ended; return its last `status`.

    Args:
      timeout_s: the largest number of seconds to wait; None means no limit.
      every_s: the seconds between two checks.

    Raises:
      TimeoutError: the job has not ended within `timeout_s`.
    """
    return wait([self], timeout_s, every_s)


def wait(jobs: Sequence[Job], timeout_s: float | None, every_s: float) -> StatusTable:
  """Wait until all jobs have ended; see `Job.wait`."""
  began = time.monotonic()
  while True:
    now = statuses([job.folder for job in jobs])
    if all(row.ended for row in now):
      return now
    if timeout_s is not None and time.monotonic() - began > timeout_s:
      raise TimeoutError(f"{jobs[0].name}: not ended within {timeout_s} s\n{now}")
    time.sleep(every_s)


class Record(ShownAsTable):
  """A list of dicts that is shown as a table: one row per dict, one column per name.

  Example:
    >>> Record([{"step": 50, "train/loss": 1.05}, {"step": 56, "eval/loss": 0.9}])
    step  train/loss  eval/loss
      50        1.05          –
      56           –        0.9
  """

  empty = "no metrics yet"

  def columns(self) -> tuple[list[str], list[list[str]], tuple[()]]:
    """See `ShownAsTable`."""
    names = list(dict.fromkeys(name for row in self for name in row if name != "time"))
    shown, half = list(self), _SHOWN // 2
    if len(shown) > _SHOWN:
      shown = [*shown[:half], dict.fromkeys(names, "…"), *shown[-half:]]

    def cell(value: Any) -> str:
      is_large = isinstance(value, float) and abs(value) >= 1000
      form = (",.0f" if is_large else ".4g") if isinstance(value, float) else ""
      return text.cell(value, form)

    return names, [[cell(row.get(name)) for name in names] for row in shown], ()
