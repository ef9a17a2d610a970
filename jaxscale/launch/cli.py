"""The command line: `python -m jaxscale.launch VERB …`."""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.validation import nearest
from jaxscale.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, one_line_errors
from jaxscale.launch import folder as folders
from jaxscale.launch import handle, logs, status, studies, sweeps
from jaxscale.launch.handle import Job, Prepared
from jaxscale.launch.profile import OPTIONS

USAGE = """\
usage: python -m jaxscale.launch submit --config FILE[:arg] [--nodes N] [option ...]
       python -m jaxscale.launch sweep --config FILE[:arg] [--sweep a.b=1,2,3 ...]
                                       [--at-most N] [option ...]
       python -m jaxscale.launch scaling --config FILE[:arg] --nodes 1,2,4
                                       [--batch fixed|grows] [option ...]
       python -m jaxscale.launch status [RUN ...] [--watch] [--every SECONDS]
       python -m jaxscale.launch logs RUN [-f] [--rank N|all|batch] [--task N]
                                       [--lines N]
       python -m jaxscale.launch cancel RUN ...
       python -m jaxscale.launch resume RUN [--nodes N] [--time T] [option ...]

Runs of jaxscale.train under Slurm, or in the background of this machine. Each has a
folder of its own under runs/, with a copy of the code and all that it writes.

  RUN                     name of a run, or its folder; for status, cancel and resume
                          also that of a scaling study, for all of its runs
  --config FILE[:arg]     as for jaxscale.train; --config.FIELD=VALUE as well
  --nodes N               nodes of the run (default 1)
  --spares N              more nodes for the job, that train when others are lost
  --name NAME             of the folder (default: the config's name and the time)
  --runs DIR              where the folders are (default runs)
  --site NAME|FILE.toml   profile of the cluster (default: $JAXSCALE_SITE, if set)
  --executor slurm|local  default: slurm where there is sbatch
  --requeue N             start again at most N times, after a preemption, a hang, or
                          a crash that made progress (default 10)
  --preflight             check the nodes first, by jaxscale.cli.doctor
  --dry-run               print the script and what would be made; make nothing
  --sweep a.b=1,2,3       values of a setting; several: all combinations; without
                          any, what get_sweep() of the config file yields
  --at-most N             trials that run at a time (default: all that have room; on
                          this machine 1)
  --batch fixed|grows     of a scaling study: the batch size stays (strong scaling,
                          the default), or grows with the nodes (weak); then
                          `python -m jaxscale.cli.report NAME` has table and picture
  --watch                 the table, again and again (every 5 seconds)
  -f                      print what comes until the run ends
  --rank N|all|batch      whose output: a process (default 0), all, or the script's
  --task N                of which trial of a sweep (default 0)
  --lines N, -n N         the last N lines only

exit code: 0 done, 2 a mistake in what was asked for, 1 anything else, 130 interrupted

for the job, instead of what the site's profile says, each with a value:
"""

_SUBMIT = (
  "config", "nodes", "spares", "name", "runs", "site", "executor", "requeue",
  *(name.replace("_", "-") for name in OPTIONS),
)  # fmt: skip
# Options with a value, and flags, of each verb.
_VERBS = {
  "submit": (_SUBMIT, ("preflight", "dry-run")),
  "sweep": ((*_SUBMIT, "sweep", "at-most"), ("preflight", "dry-run")),
  "scaling": ((*_SUBMIT, "batch"), ("preflight", "dry-run")),
  "status": (("runs", "every"), ("watch",)),
  "logs": (("runs", "rank", "task", "lines"), ("follow",)),
  "cancel": (("runs",), ()),
  "resume": (
    ("runs", "nodes", "spares", *(name.replace("_", "-") for name in OPTIONS)), ()
  ),
}  # fmt: skip
_SHORT = {"-f": "--follow", "-n": "--lines", "-h": "--help"}


class Asked(NamedTuple):
  """A command line, taken apart.

  Attributes:
    verb: what to do.
    names: runs that it is about.
    options: values by option, all that were given.
    overrides: settings of the config.
    flags: that were given.
  """

  verb: str
  names: list[str]
  options: dict[str, list[str]]
  overrides: dict[str, str]
  flags: set[str]

  def get(self, name: str, default: str) -> str:
    """The value of an option; the last one counts."""
    return self.options.get(name, [default])[-1]

  def number(self, name: str, default: int, least: int = 0) -> int:
    """A whole number.

    Raises:
      ConfigError: it is none, or too small.
    """
    text = self.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
      raise ConfigError(f"--{name}={text}: give a whole number >= {least}")
    return int(text)


def parse(argv: Sequence[str]) -> Asked:
  """Take a command line apart.

  Raises:
    ConfigError: an unknown verb or option, or one without its value.

  Example:
    >>> parse(["logs", "digits", "-f"]).flags
    {'follow'}
  """
  if not argv or argv[0] not in _VERBS:
    what = argv[0] if argv else "python -m jaxscale.launch"
    raise ConfigError(f"{what}: give a verb, {nearest(what, _VERBS)}")
  verb, *args = argv
  with_value, flags = _VERBS[verb]
  asked = Asked(verb, [], {}, {}, set())
  while args:
    arg = args.pop(0)
    name, given, value = arg.partition("=")
    name = _SHORT.get(name, name)
    if not name.startswith("-"):
      asked.names.append(arg)
      continue
    option = name.removeprefix("--")
    if option in (*flags, "help") and not given:
      asked.flags.add(option)
      continue
    is_override = option.startswith("config.") and "config" in with_value
    if option not in with_value and not is_override:
      known = [f"--{n}" for n in (*with_value, *flags, "help")]
      setting = "" if "config" not in with_value else (
        "; a setting is --config.FIELD=VALUE"
      )  # fmt: skip
      raise ConfigError(f"{arg}: not an option, {nearest(name, known)}{setting}")
    if not given:
      if not args or args[0].startswith("--"):
        raise ConfigError(f"{name}: a value is missing, write {name}=VALUE")
      value = args.pop(0)
    if is_override:
      asked.overrides[option.removeprefix("config.")] = value
    else:
      asked.options.setdefault(option, []).append(value)
  return asked


@one_line_errors
def main(argv: list[str]) -> int:
  """Do what the command line asks for; returns the exit code."""
  if argv[:1] in (["--help"], ["-h"]):
    print(_help())
    return EXIT_DONE
  asked = parse(argv)
  if "help" in asked.flags:
    print(_help())
    return EXIT_DONE
  try:
    _DO[asked.verb](asked, argv)
  except KeyboardInterrupt:
    return EXIT_INTERRUPTED
  return EXIT_DONE


def _help() -> str:
  words = " ".join(f"--{name.replace('_', '-')}" for name in OPTIONS)
  return USAGE + textwrap.fill(
    words, 86, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
  )


def _submit(asked: Asked, argv: list[str]) -> None:
  """`submit` and `sweep`."""
  config = _config(asked)
  trials, at_most = [], 0
  if asked.verb == "sweep":
    lists = asked.options.get("sweep")
    trials = sweeps.product(lists) if lists else sweeps.from_file(config)
    at_most = asked.number("at-most", 0)
    if not trials:
      raise ConfigError(f"{config}: its get_sweep() yields nothing")
  prepared = handle.prepare(
    config,
    trials=trials,
    at_most=at_most,
    nodes=asked.number("nodes", 1, 1),
    name=asked.options.get("name", [None])[-1],
    **_common(asked, argv),
  )
  _launch(prepared, asked)


def _config(asked: Asked) -> str:
  if asked.names:
    raise ConfigError(f"{asked.names[0]}: not an option; a config is --config FILE")
  if "config" not in asked.options:
    raise ConfigError("--config: missing; try --config configs/digits.py")
  return asked.options["config"][-1]


def _common(asked: Asked, argv: list[str]) -> dict[str, Any]:
  """What all kinds of submission have."""
  given = {n: v[-1] for n, v in asked.options.items()}
  return {
    "overrides": asked.overrides,
    "site": given.get("site"),
    "executor": given.get("executor"),
    "requeue": asked.number("requeue", 10),
    "spares": asked.number("spares", 0),
    "preflight": "preflight" in asked.flags,
    "runs": asked.get("runs", "runs"),
    "made_by": handle.command_line(argv),
    **_job_options(asked),
  }


def _job_options(asked: Asked) -> dict[str, str]:
  given = {n.replace("-", "_"): v[-1] for n, v in asked.options.items()}
  return {n: given[n] for n in OPTIONS if n in given}


def _launch(prepared: Prepared, asked: Asked) -> None:
  if "dry-run" in asked.flags:
    _show(prepared)
    return
  job = handle.launch(prepared)
  print(f"{job.name}: submitted as {folders.last_job(job.folder)}{_trials(prepared)}")
  print(f"  {job.folder}")
  _hints(asked, job.name, "launch status", "launch logs -f", "launch cancel")


def _show(prepared: Prepared) -> None:
  """What `--dry-run` prints."""
  run = prepared.run
  print(prepared.script)
  count = len(folders.sources(None if prepared.text else prepared.config))
  print(f"# would make {run.folder} with {count} files of code{_trials(prepared)}")
  print(f"# and hand it to {run.executor}: {run.processes} processes")


def _trials(prepared: Prepared) -> str:
  return f", {len(prepared.run.trials)} trials" if prepared.run.trials else ""


def _hints(asked: Asked, name: str, *commands: str) -> None:
  """What one may type next."""
  runs = asked.get("runs", "runs")
  where = "" if runs == "runs" else f" --runs {shlex.quote(runs)}"
  for command in commands:
    print(f"  python -m jaxscale.{command} {name}{where}")


def _scaling(asked: Asked, argv: list[str]) -> None:
  """The same config at several sizes: a run each."""
  config, given = _config(asked), asked.get("nodes", "")
  sizes = given.split(",")
  if not all(s.isdecimal() and int(s) for s in sizes):
    raise ConfigError(f"--nodes={given}: give several sizes, e.g. 1,2,4,8")
  prepared = studies.prepare(
    config,
    [int(s) for s in sizes],
    batch=asked.get("batch", "fixed"),
    name=asked.options.get("name", [None])[-1],
    **_common(asked, argv),
  )
  if "dry-run" in asked.flags:
    for one in prepared.runs:
      _show(one)
    return
  study = studies.launch(prepared)
  for job in study.jobs:
    print(f"{job.name}: submitted as {folders.last_job(job.folder)}")
  print(f"  {study.folder}")
  _hints(asked, study.name, "launch status", "launch cancel", "report")


def _jobs(asked: Asked) -> list[Job]:
  if not asked.names:
    raise ConfigError(f"{asked.verb}: of which run? see `status`")
  runs = asked.get("runs", "runs")
  return [Job(path) for path in folders.find_all(asked.names, runs)]


def _status(asked: Asked, argv: list[str]) -> None:
  del argv
  every = asked.number("every", 5, 1)
  while True:
    runs = asked.get("runs", "runs")
    paths = folders.find_all(asked.names, runs) or folders.all_folders(runs)
    found = status.rows(paths)
    text = status.table(found)
    if "watch" not in asked.flags:
      print(text)
      return
    # Home, clear what was there, and the time: a terminal shows one table.
    clear = "\033[H\033[J" if sys.stdout.isatty() else ""
    print(f"{clear}{text}\n{time.strftime('%H:%M:%S')}", flush=True)
    if all(row.ended for row in found):
      return
    time.sleep(every)


def _logs(asked: Asked, argv: list[str]) -> None:
  del argv
  (job, *others) = _jobs(asked)
  if others:
    names = ", ".join(j.name for j in (job, *others))
    raise ConfigError(f"{asked.names[-1]}: logs of one run at a time, of {names}")
  run, lines = folders.read_run(job.folder), asked.options.get("lines")
  files = logs.choose(run, asked.get("rank", "0"), asked.number("task", 0))
  if "follow" in asked.flags:
    for line in logs.follow(files, lambda: all(r.ended for r in job.status())):
      print(line, flush=True)
    return
  task = asked.number("task", 0)
  if not _said(files) and "rank" not in asked.options:
    # Another rank may say why this one was ended, or the script why none began.
    every, batch = (logs.choose(run, rank, task) for rank in ("all", "batch"))
    files = every if _said(every) else batch
  if not _said(files):
    raise ConfigError(f"{run.name}: nothing printed yet; see `status {run.name}`")
  count = asked.number("lines", 1, 1) if lines else None
  for line in logs.last(files, count):
    print(line)


def _said(files: Sequence[tuple[str, Path]]) -> bool:
  return any(path.exists() and path.stat().st_size for _, path in files)


def _cancel(asked: Asked, argv: list[str]) -> None:
  del argv
  for job in _jobs(asked):
    told = "told to save and end" if job.cancel() else "has ended already"
    print(f"{job.folder.name}: {told}")


def _resume(asked: Asked, argv: list[str]) -> None:
  del argv
  nodes = asked.number("nodes", 1, 1) if "nodes" in asked.options else None
  spares = asked.number("spares", 0) if "spares" in asked.options else None
  for job in _jobs(asked):
    job.resume(nodes=nodes, spares=spares, **_job_options(asked))
    print(f"{job.folder.name}: submitted again as {folders.last_job(job.folder)}")


_DO = {
  "submit": _submit, "sweep": _submit, "scaling": _scaling, "status": _status,
  "logs": _logs, "cancel": _cancel, "resume": _resume,
}  # fmt: skip
