"""Record of a run in its workdir, and checks that a workdir belongs to the same experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import jax

from jaxscale import __version__, cluster
from jaxscale.checkpoint import checkpoint_files, directory
from jaxscale.cluster.rendezvous.handshake import versions
from jaxscale.config import Config
from jaxscale.config.choice import is_built_in
from jaxscale.config.record import FORMAT, RUN, check_format, class_name, copy_own_files, to_plain
from jaxscale.config.validation import shown
from jaxscale.errors import ConfigError, invalid, unwritable
from jaxscale.experiment import build, derive
from jaxscale.files import mismatch, read_json, require_json, write_json
from jaxscale.metrics.text import plural
from jaxscale.run import adaptive_batch, goodput, model_files, nan_policy, tracking
from jaxscale.run.identity import SHAPE as IDENTITY
from jaxscale.run.identity import Change, changes, other_environment
from jaxscale.run.settings import DECISIONS

# Settings that may change when a run resumes: where it runs and what it records.
_NOT_IDENTITY = """mesh layout compilation compiler_options compiler_preset
  evaluation checkpoint checks faults log
  metrics target_accuracy target_loss stop_at_target input_threads gpu_settings exchange.algorithm
  exchange.dims data.cache_dir data.max_pixels callbacks""".split()
_LENGTH = "epochs", "steps"
# Locations of the data may also change, if the run has the identity of their content.
_PLACES = "data.path", "data.data_dir", "data.tokenizer", "data.template", "data.dtype"
ACCEPTED = "accepted: "  # prefix of the lines of accepted changes
# Keys under which `to_plain` records the content of values without a JSON form.
_CONTENTS = "shape", "dtype", "sha256", "fingerprint", "identity"


_RUN = RUN | {"derived": {"total_steps": int, "num_devices": int}}


def write_config(workdir: Path, described: dict[str, Any], config: Config) -> None:
  """Write config.json, with copies of the user's own files and of the pretrained model's."""
  files = copy_own_files(config, workdir)
  model_files.keep(config, workdir)
  write_json(workdir / "config.json", described | ({"files": files} if files else {}))


def describe(
  experiment: build.Experiment, identity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Return the resolved config, the values derived from it, and the software, as JSON.

  Args:
    experiment: the experiment of the run.
    identity: the identity of the run, from `identity_of`; None leaves it out.
  """
  phases = [phase._asdict() for phase in experiment.derived.phases]
  described: dict[str, Any] = {"format": FORMAT, "config": to_plain(experiment.config)}
  described |= {"derived": experiment.derived._asdict() | {"phases": phases}}
  about = experiment.train_data.info._asdict()
  about["arrays"] = {**about["arrays"]}  # JSON takes no other mapping
  described |= {"data": about} | _software()
  described |= {"devices": [str(d) for d in jax.devices()], "processes": jax.process_count()}
  return described | ({} if identity is None else {"identity": identity})


def _software() -> dict[str, Any]:
  """Return the software and hardware that arithmetic depends on."""
  packages = ("jaxscale", "jax", "flax", "optax", "orbax-checkpoint")
  kind = jax.devices()[0].device_kind
  found = versions(packages)
  return {"python": found.pop("python"), "versions": found, "device_kind": kind}


def describe_text(experiment: build.Experiment, workdir: Path) -> str:
  """Return the few lines that a run's log begins with.

  The lines have the devices, the data, the steps, and the settings that differ from
  their defaults.
  """
  derived, phases = experiment.derived, experiment.derived.phases
  lines = [f"jaxscale {__version__} on {devices_of(experiment)}"]
  lines.append(f"workdir: {workdir} (all settings: config.json)")
  settings = (f"{n}={_without_defaults(v)}" for n, v in _changed(experiment.config).items())
  lines += _wrapped(f"settings: {', '.join(settings) or 'defaults'}")
  data = f"{derived.num_train:,} training examples, {derived.num_eval:,} validation examples"
  lines.append(f"data: {data} in batches of {derived.eval_batch_size:,}")
  size, micro = derived.device_batch_size, derived.micro_batch_size
  each = f"{size:,} per device" + f", {micro:,} per micro-batch" * (micro != size)
  lines += _wrapped(
    f"training: {plural(derived.total_steps, 'step')} of {phases[0].batch_size:,} examples "
    f"({each}), {plural(derived.warmup_steps, 'warmup step')}, peak lr {derived.peak_lr:.6g}; "
    f"evaluation every {derived.eval_every:,} and checkpoint every {derived.save_every:,} steps"
  )
  if len(phases) > 1:
    parts = [f"steps {p.start + 1:,} to {p.stop:,}: batch {p.batch_size:,}" for p in phases]
    sizes = [f", images of {p.image_size}" * bool(p.image_size) for p in phases]
    rule = type(getattr(experiment.config.phases, "when", experiment.config.phases)).__name__
    sizes[-1] += f" or as {rule} decides" * (not phases[-1].is_decided)
    lines += _wrapped(f"phases: {'; '.join(map(str.__add__, parts, sizes))}")
  if text := derive.device_summary(experiment.config, derived):
    lines.append(text)
  return "\n".join([*lines, *experiment.notes])


def _wrapped(text: str) -> list[str]:
  """Break a line of the log at 98 columns, with the rest indented."""
  return textwrap.wrap(text, 98, subsequent_indent="  ", break_long_words=False)


def devices_of(experiment: build.Experiment) -> str:
  """Describe the number and kind of devices, and the number of processes."""
  devices = experiment.mesh.devices.ravel()
  kind, n = devices[0].device_kind, jax.process_count()
  return f"{len(devices)} x {kind}" + f", {n} processes" * (n > 1)


def _changed(settings: Any) -> dict[str, Any]:
  """Return the fields of settings that differ from their defaults."""
  changed = {}
  for field in dataclasses.fields(settings):
    value, default = getattr(settings, field.name), _default(field)
    # Compare as text: arrays have no single ==, and given values may equal a choice's defaults.
    if default is MISSING or _without_defaults(value) != _without_defaults(default):
      changed[field.name] = value
  return changed


def _default(field: dataclasses.Field[Any]) -> Any:
  return field.default if field.default_factory is MISSING else field.default_factory()


def _without_defaults(value: Any) -> str:
  """Format a setting as in a config file, arrays by dtype and shape."""
  if hasattr(value, "dtype") and hasattr(value, "shape"):
    return f"{value.dtype}{list(value.shape)}"
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    text = getattr(value, "__qualname__", None) or str(value)  # Without a function's address.
    return text if len(text) <= 300 else shown(value)
  fields = (f"{n}={_without_defaults(v)}" for n, v in _changed(value).items())
  return f"{type(value).__name__}({', '.join(fields)})"


def experiment_in(workdir: Path, config: Any, accept: Collection[str] = ()) -> build.Experiment:
  """Build the experiment for a workdir, as `build.experiment`; all processes call it.

  If the run began on a different number of devices, its batches are divided over the
  current devices so that none holds more examples at a time than at the beginning.

  Raises:
    ConfigError: data or devices do not fit the config or the run.
  """
  return build.experiment(config, cluster.from_leader(start_devices(workdir, config, accept)))


def start_devices(workdir: Path, config: Any, accept: Collection[str] = ()) -> int | None:
  """Return the number of devices on which the run of a workdir began.

  A run without a checkpoint begins anew at each start. The result is then the largest
  number of devices that it was started on, with this start, since the smallest
  micro-batches belong to that number and fit the memory of all.

  Args:
    workdir: the run's workdir.
    config: the config of the run that resumes.
    accept: the accepted kinds of changes, "data" and "code".

  Returns:
    The number, or None if the run begins now or the workdir belongs to another
    experiment (which `claim_workdir` reports).
  """
  described = read_json(workdir / "config.json", _RUN)
  if not described or _refused([*_setting_changes(described, config)], accept):
    return None
  derived = described["derived"]
  start = derived.get("start_devices") or derived["num_devices"]
  if mismatch(start, int) or start < 1:
    return None
  return start if directory.steps(workdir / "checkpoints") else max(start, jax.device_count())


def claim_workdir(
  workdir: Path,
  config: Any,
  identity: Mapping[str, Any] | None = None,
  accept: Collection[str] = (),
) -> list[str]:
  """Create the workdir, or check that it belongs to this experiment.

  A setting that did not exist when the workdir was created counts as its default. A run
  without a checkpoint begins anew, with any settings. A run may get more epochs.

  Args:
    workdir: the run's workdir.
    config: the config of the run that begins or resumes.
    identity: the identity of the run, from `identity_of`; None skips its comparison.
    accept: the accepted kinds of changes, "data" and "code".

  Returns:
    The accepted changes, and a note of what cannot be compared, as lines.

  Raises:
    ConfigError: the workdir cannot be created, belongs to another experiment, was trained
      with different data or code, or contains a link of another user, for example from
      checkpoints/ to a folder of the other user.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    links = [entry for entry in os.scandir(workdir) if entry.is_symlink()]
    owners = {entry.path: entry.stat(follow_symlinks=False).st_uid for entry in links}
  except OSError as e:
    raise unwritable(workdir, e) from None
  for link, owner in owners.items():
    if owner not in (os.geteuid(), 0):
      fix = "remove it, or use another --workdir"
      raise ConfigError(f"{link}: this link belongs to another user (uid {owner}); {fix}")
  path = workdir / "config.json"
  if not os.path.exists(path):
    before = _saved_identity(workdir) if identity and _has_saved(workdir) else {}
    return _accepted(workdir, [*changes(before, identity or {})], accept)
  if not os.path.isfile(path):  # A folder, which cannot be replaced, or a pipe.
    raise ConfigError(f"{path}: not a file; move it away, or use another --workdir")
  if not _has_saved(workdir):
    return []
  remedy = "delete it if --config is the config of its run, or use another --workdir"
  described = require_json(path, {"config": {}}, remedy)
  check_format(described, workdir)
  if problem := mismatch(described, _RUN):
    raise ConfigError(f"{path}: {problem}; {remedy}")
  found = [*_setting_changes(described, config)]
  if identity is None:
    return _accepted(workdir, found, accept)
  before = described.get("identity") or _saved_identity(workdir)
  lines = _accepted(workdir, [*found, *changes(before, identity)], accept)
  if not before:
    reason = "because a version before 0.3 wrote it; data and code are not compared"
    lines.append(f"note: config.json has no identity of data and code, {reason}")
  now = {"identity": identity, "config": vars(config)} | _software()
  if before and (other := other_environment(described, now)):
    lines.append(f"note: resuming with {other}; results may differ by rounding")
  return lines


def _saved_identity(workdir: Path) -> dict[str, Any]:
  """Return the identity in the newest checkpoint that has one; empty if none has."""
  for step in reversed(directory.steps(workdir / "checkpoints")):
    with contextlib.suppress(checkpoint_files.DamagedError):
      manifest = checkpoint_files.read_manifest(workdir / "checkpoints" / str(step))
      identity = manifest.get("identity") or {}
      if not mismatch(identity, IDENTITY):
        return identity
  return {}


def _accepted(workdir: Path, changes: list[Change], accept: Collection[str]) -> list[str]:
  """Return accepted changes as lines.

  Raises:
    ConfigError: there are changes that are not accepted.
  """
  if not (refused := _refused(changes, accept)):
    return [f"{ACCEPTED}{change.text}" for change in changes]
  kind, field = refused[0].kind, "--workdir"
  if kind == "settings":
    problem = f"belongs to a different experiment: {refused[0].text}"
    raise ConfigError(f"{field}={workdir}: {problem}; use another {field}")
  if kind == "x64":
    problem = f"cannot resume: {refused[0].text}"
    raise invalid(field, str(workdir), problem, f"restore the setting, or use another {field}")
  kinds = list(dict.fromkeys(change.kind for change in refused))
  texts = [change.text for change in refused if change.kind in kinds]
  more = f", and {plural(len(texts) - 2, 'more change')}" * (len(texts) > 2)
  differs = " and ".join(f"different {kind}" for kind in kinds)
  problem = f"was trained with {differs} ({', '.join(texts[:2])}{more})"
  fix = f"resume with --accept-changes={','.join(kinds)}"
  fix = f"restore the {' and '.join(kinds)}, use another {field}, or {fix}"
  raise invalid(field, str(workdir), problem, fix)


def forget_unsaved(workdir: Path, config: Any) -> None:
  """Delete the decisions and records of another experiment that saved no checkpoint.

  Only the process that holds the lock on the workdir may call it.
  """
  path = workdir / "config.json"
  if _has_saved(workdir) or not os.path.exists(path):
    return
  described = read_json(path, _RUN)  # empty if the file is damaged
  if not described or any(_setting_changes(described, config)):
    decided = adaptive_batch.FILE, nan_policy.FILE, tracking.FILE, "summary.json"
    for name in (*decided, DECISIONS, goodput.FILE):
      (workdir / name).unlink(missing_ok=True)


def length_before(workdir: Path, config: Any) -> dict[str, Any]:
  """Return the `epochs` and `steps` of a run before its config changed them."""
  described = read_json(workdir / "config.json", {"config": {}})
  length = {unit: getattr(config, unit) for unit in _LENGTH}
  if not described or not _has_saved(workdir):
    return length
  return {unit: described["config"].get(unit) for unit in _LENGTH}


def _has_saved(workdir: Path) -> bool:
  """Return whether there are checkpoints, damaged ones included."""
  checkpoints = workdir / "checkpoints"
  return bool(directory.steps(checkpoints)) or directory.has_damaged(checkpoints)


def _refused(changes: list[Change], accept: Collection[str]) -> list[Change]:
  """Return the changes that are not accepted; settings and x64, which never are, first."""
  refused = [change for change in changes if change.kind not in accept]
  return sorted(refused, key=lambda c: ("settings", "x64", "data", "code").index(c.kind))


def _setting_changes(described: dict[str, Any], config: Any) -> Iterator[Change]:
  """Yield the settings that define a different experiment, with both values.

  Args:
    described: the config.json of the run in the workdir.
    config: the current config.
  """
  before, now = _completed(described["config"], config), to_plain(config)
  free: set[str] = set(_NOT_IDENTITY)
  if now["sync"].get("workers") == "replica":
    free.remove("mesh")  # With workers="replica", the mesh sets the number of workers.
  if config.model.is_stack and not now["noise_scale"]:
    # These have no randomness and no statistics per micro-batch, so a pipeline may resume
    # a run that began without micro-batches.
    free.add("accumulate_steps")
  for unit in _LENGTH:  # A run may become longer.
    length: Any = before.get(unit) or 0
    if not mismatch(length, float) and 0 < length < (now[unit] or 0):
      free.add(unit)
  # If the run has the identity of its data, the data may move.
  if described.get("identity") and is_built_in(type(config.data)):
    free |= set(_PLACES)
  for name, (old, new) in _differences(before, now).items():
    in_source = re.sub(r"^(data\.)sources\.[^.]+\.", r"\1", name)  # of a mixture
    if not {name, in_source, name.split(".")[0]} & free:
      kind = "code" if name.endswith(".source") else None
      if name.startswith("data.") and name.rpartition(".")[2] in _CONTENTS:
        kind = "data"
      text = f"{name} is {shown(old)} in the workdir and {shown(new)} now"
      yield Change(kind or "settings", text)


def _completed(before: Any, node: Any) -> Any:
  """Return described settings, with defaults for those that did not exist then."""
  if isinstance(before, dict) and isinstance(node, dict):
    return {k: _completed(v, node.get(k)) for k, v in before.items()}
  if not isinstance(before, dict) or not dataclasses.is_dataclass(node):
    return before
  if before.get("class", class_name(type(node))) != class_name(type(node)):
    return before
  defaults = {}
  for f in dataclasses.fields(node):
    if f.repr and (default := _default(f)) is not MISSING:
      defaults[f.name] = to_plain(default)
  return defaults | {k: _completed(v, getattr(node, k, None)) for k, v in before.items()}


def _differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
  if isinstance(old, dict) and [*old] == ["object"] and ":" not in str(old["object"]):
    return {}  # Earlier versions recorded only the type.
  if isinstance(old, dict) and isinstance(new, dict):
    result = {}
    for name in {**old, **new}:
      path = f"{prefix}.{name}" if prefix else name
      result |= _differences(old.get(name), new.get(name), path)
    return result
  if old == new or json.dumps(old) == json.dumps(new):  # NaN does not equal itself.
    return {}
  return {prefix: (old, new)}
