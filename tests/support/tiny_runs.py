"""Short command-line runs on the digits, and their files."""

import time

import jax

from jaxscale import metrics
from jaxscale.checkpoint.checkpoint_files import read_manifest
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.config.loading import load_config
from jaxscale.exchange import plain
from jaxscale.experiment import build
from jaxscale.mesh import make_mesh
from support import at_step
from support.commands import child_env, train_command
from support.configs import settings
from support.processes import killed_at_end, popen, run_group, wait_until
from support.trees import assert_same_bits

# Small and often saved: 79 steps, a checkpoint every second one.
TINY = settings("""
  epochs=7 model=MLP model.hidden=(64,) log.every_steps=7
  evaluation.every_epochs=1 checkpoint.every_epochs=0.18
  log.plot=False
""")
ARGS = [f"--config.{name}={value}" for name, value in TINY.items()]
# For runs that a test stops, however late. One whose output nobody reads waits in a full pipe.
ENDLESS = "--config.epochs=1000000"


def restored(workdir, experiment):
  """Return the newest checkpoint of a run, on the host."""
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    state = checkpoints.restore(experiment.abstract_state())
  assert state is not None
  return jax.device_get(state)


def final_state(workdir, num_devices=1):
  """Return the newest checkpoint of a run of the tiny digits, on the host."""
  config = load_config("configs/digits.py", TINY | {"mesh.data": "8"})
  experiment = build.experiment(config)
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  return restored(workdir, experiment.replace(mesh=mesh, exchange=plain(mesh.axis_names)))


def record(workdir):
  """Return the metrics file without values that depend on the clock."""
  lines = []
  for line in metrics.read_json_lines(workdir / "metrics.jsonl"):
    kept = {k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")}
    lines += [kept] if len(kept) > 1 else []
  return lines


def assert_same_run(workdir, reference):
  assert_same_bits(final_state(workdir), final_state(reference))
  assert record(workdir) == record(reference)


def command(workdir, *args, config=None):
  """Return the command line of the tiny digits, or of another config."""
  if config:
    return train_command(workdir, *args, config=config)
  return train_command(workdir, *ARGS, *args)


def start(workdir, *args, config=None, num_devices=1, **env):
  """Start a run as a process."""
  return popen(*command(workdir, *args, config=config), env=child_env(num_devices, **env))


def checkpoint_names(workdir):
  directory = workdir / "checkpoints"
  return [p.name for p in directory.iterdir()] if directory.exists() else []


def newest_step(workdir):
  return max((int(n) for n in checkpoint_names(workdir) if n.isdigit()), default=0)


def kill(workdir, *args, until, in_mid_save=False, after=None, later=0.0, **options):
  """Start a run, and kill it after its next checkpoint.

  Args:
    workdir: the workdir of the run.
    args: arguments of `start`, as are `options`.
    until: the step before which the run waits for the kill, which may come earlier.
    in_mid_save: whether to kill it while it saves a checkpoint, that of step `until` or the
      next one.
    after: the step before the checkpoint; by default that of the newest one.
    later: the seconds from the checkpoint to the kill.
  """
  step = newest_step(workdir) if after is None else after
  options |= at_step.hold_save(until) if in_mid_save else at_step.hold(until)
  with killed_at_end(start(workdir, *args, **options)) as process:
    wait_until(lambda: newest_step(workdir) > step, process, seconds=300)
    if in_mid_save:
      wait_until(lambda: is_saving(workdir, until), process, seconds=300)
    time.sleep(later)


def is_saving(workdir, since=0):
  """Return whether a checkpoint of step `since` or a later one is half-written."""
  partial = (name.partition(".tmp-") for name in checkpoint_names(workdir))
  return any(mark and int(step.strip(".")) >= since for step, mark, _ in partial)


def run_processes(workdir, count, num_devices, *args, config=None, **env):
  """Return (stdout, stderr, exit code) of each process of a run; arguments as in `start`."""
  return run_group(command(workdir, *args, config=config), count, num_devices, **env)


def checksums(workdir):
  """Return the recorded checksum of every array in the newest checkpoint."""
  step = newest_step(workdir)
  leaves = read_manifest(workdir / "checkpoints" / str(step))["leaves"]
  return step, {name: leaf["checksum"] for name, leaf in leaves.items()}


def events_of(path):
  """Return the events in a TensorBoard file: TFRecords of length, crc, event, crc."""
  from tensorboardX.proto.event_pb2 import Event

  content, events = path.read_bytes(), []
  while content:
    length = int.from_bytes(content[:8], "little")
    events.append(Event.FromString(content[12 : 12 + length]))
    content = content[16 + length :]
  return events


def shown_by_tensorboard(workdir):
  """Return (step, tag) of all points in TensorBoard's EventAccumulator; START drops later steps."""
  points = []
  for path in sorted((workdir / "tensorboard").iterdir()):
    for event in events_of(path):
      if event.session_log.status == event.session_log.START:
        points = [point for point in points if point[0] < event.step]
      points += [(event.step, value.tag) for value in event.summary.value]
  return points
