"""Site profile: the properties of a cluster, in a TOML file that is written once.

A profile holds the settings that all submissions share: partition, account, GPUs per node,
modules, container. Command-line options override it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxscale.config.validation import hints, nearest, settings
from jaxscale.errors import ConfigError
from jaxscale.files import expand, read_bytes, whole_number
from jaxscale.planning.machine import Machine

_PATTERNS = {
  # Formats of sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours,
  # days-hours:minutes, days-hours:minutes:seconds.
  "time": (r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", "24:00:00 or 2-12:00:00"),
  # "[{R|B}:]<sig_num>[@sig_time]", sbatch(1), --signal.
  "signal": (r"([RB]{1,2}:)?\w+(@\d+)?", "USR1@120"),
}


@settings
class Container:
  """Container image in which the training command runs.

  Attributes:
    kind: the runtime; "apptainer" or "singularity", which `srun` starts in every task, or
      "pyxis", Slurm's plugin for enroot.
    image: the path of the image, or an address such as docker://… that the runtime knows.
    mounts: the directories to mount, as HOST or HOST:INSIDE; the run's folder and the
      directory of the submission are always mounted.
    options: additional options of the runtime (`apptainer exec`, or srun's --container-…).
  """

  kind: Literal["apptainer", "singularity", "pyxis"]
  image: str
  mounts: tuple[str, ...] = ()
  options: tuple[str, ...] = ()


@settings
class Site:
  """Properties of a cluster, and the resources that a job requests.

  Attributes:
    partition: the partition of the job
    account: the account that is charged for the job
    qos: the quality of service of the job
    constraint: the features that nodes must have, as for sbatch
    reservation: the reservation to run the job in
    exclude: the nodes that the job must not use
    mem: the memory per node, with a unit as in 64G; 0 requests all memory
    time: the time limit of the job, as 90 (minutes), 24:00:00 or 2-12:00:00
    gpus_per_node: the number of GPUs per node
    tasks_per_node: the number of processes per node (default: one per GPU, or one)
    cpus_per_task: the number of processor cores per process
    signal: the signal to the job before its time limit, as SIGNAL@SECONDS
    python: the Python interpreter of the job (default: the one that submits, or `python`
      in a container)
    modules: the modules to load by `module load`, in this order
    setup: lines of bash that run before the job, after the modules
    env: a table of environment variables
    container: a table that describes the container image
    machine: a table of the speed of chips and links, for `jaxscale plan`
    sbatch: more options of sbatch
    srun: more options of srun
  """

  partition: str = ""
  account: str = ""
  qos: str = ""
  constraint: str = ""
  reservation: str = ""
  exclude: str = ""
  mem: str = ""
  time: str = ""
  gpus_per_node: Annotated[int, "in [0, 1024]"] = 0
  tasks_per_node: Annotated[int | None, "in [1, 1024]"] = None
  cpus_per_task: Annotated[int | None, "in [1, 65536]"] = None
  signal: str = "USR1@120"
  python: str = ""
  modules: tuple[str, ...] = ()
  setup: tuple[str, ...] = ()
  env: tuple[str, ...] = ()
  container: Container | None = None
  machine: Machine | None = None
  sbatch: tuple[str, ...] = ()
  srun: tuple[str, ...] = ()

  def __post_init__(self):
    for name, (pattern, example) in _PATTERNS.items():
      value = getattr(self, name)
      if value and not re.fullmatch(pattern, value):
        raise ConfigError(f"Site.{name}={value!r}: give e.g. {example}")
    for pair in self.env:
      if not re.fullmatch(r"[A-Za-z_]\w*", name := pair.partition("=")[0], re.A):
        raise ConfigError(f"Site.env: {name!r} is not a valid name of a variable; correct it")
    for name, value in vars(self).items():
      refused = "\0" if name == "setup" else "[\0\n]"
      for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and re.search(refused, text):
          raise ConfigError(f"Site.{name}={text!r}: give it in a single line")

  @property
  def tasks(self) -> int:
    """Processes on each node."""
    return self.tasks_per_node or max(self.gpus_per_node, 1)


# Fields that are also options of the command line: --gpus-per-node for gpus_per_node.
OPTIONS = tuple(n for n, kind in hints(Site).items() if kind in (str, int, int | None))


def site_from(table: Mapping[str, Any]) -> Site:
  """Convert plain tables, as in TOML or JSON, to a site.

  Raises:
    ConfigError: a name is unknown, or a value has the wrong type or is out of range.

  Example:
    >>> site_from({"partition": "gpu", "env": {"NCCL_DEBUG": "WARN"}}).env
    ('NCCL_DEBUG=WARN',)
  """
  fields = dict(table)
  if isinstance(env := fields.get("env"), Mapping):
    for name, value in env.items():
      if type(value) not in (str, int):
        raise ConfigError(f'Site.env.{name}={value!r}: give text, as in "1"')
    fields["env"] = tuple(f"{name}={value}" for name, value in env.items())
  for name, kind in (("container", Container), ("machine", Machine)):
    if isinstance(values := fields.get(name), Mapping):
      fields[name] = kind(**values)
  return Site(**fields)


def load_site(name: str | None) -> Site:
  """Load a site profile by its name or path.

  Args:
    name: a path that ends in .toml, or the name of a file in ~/.config/jaxscale/sites (or
      $XDG_CONFIG_HOME/jaxscale/sites). None uses $JAXSCALE_SITE, or else no profile.

  Raises:
    ConfigError: the profile does not exist or is invalid.
  """
  name = expand(name or os.environ.get("JAXSCALE_SITE") or "")
  if not name:
    return Site()
  path = Path(name) if name.endswith(".toml") else sites_folder() / f"{name}.toml"
  try:
    return site_from(tomllib.loads(read_bytes(path).decode()))
  except OSError as e:
    known = {p.stem for p in sites_folder().glob("*.toml")}
    hint = nearest(name, known) if known else f"give a FILE.toml, or make {path}"
    raise ConfigError(f"--site={name}: {e.strerror}, {hint}") from None
  except RecursionError:
    raise ConfigError(f"{path}: nested too deeply; use flat tables and lists") from None
  except ValueError as e:  # invalid TOML or UTF-8, or a ConfigError
    raise ConfigError(f"{path}: {e}") from None


def sites_folder() -> Path:
  """Return the folder of named profiles (XDG Base Directory Specification)."""
  config = os.environ.get("XDG_CONFIG_HOME") or os.path.join("~", ".config")
  return Path(os.path.expanduser(config)) / "jaxscale" / "sites"


def with_options(site: Site, options: Mapping[str, Any]) -> Site:
  """Override fields of a site by options of the command line or of a call.

  Args:
    site: the profile.
    options: the values by field; numbers may be text.

  Raises:
    ConfigError: an option is unknown, or its value is invalid.
  """
  changes: dict[str, Any] = {}
  for name, value in options.items():
    if name not in OPTIONS:
      raise ConfigError(f"{name}={value!r}: not an option, {nearest(name, OPTIONS)}")
    if hints(Site)[name] is str:
      value = str(value) if isinstance(value, int) else value  # time=90 in a notebook
    elif isinstance(value, str):
      if (number := whole_number(value)) is None:
        raise ConfigError(f"--{name.replace('_', '-')}={value}: give a whole number")
      value = number
    changes[name] = value
  try:
    return dataclasses.replace(site, **changes)
  except ConfigError as e:
    field, _, rest = str(e).removeprefix("Site.").partition("=")
    raise ConfigError(f"--{field.replace('_', '-')}={rest}") from None
