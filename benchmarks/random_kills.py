"""Repeated runs that are killed, or whose disk loses power, at random moments.

    python benchmarks/random_kills.py [--kills 200] [--seed 0] [--only CHAIN]

A small run of one or two processes saves every other step and keeps one checkpoint. In
a chain it is killed up to eight times, each time started again, and then trains to its
end. A kill is SIGKILL of one of its processes at a random moment (while it starts, as a
checkpoint is being written, after a commit, or between). In every other chain, where
this user may mount, the workdir is on an ext4 of its own, which half of the kills shut
down without flushing anything (as a loss of power does), check and mount again.

Three things must hold. A start resumes from the newest checkpoint that was durable
before the kill, or from a newer one: after SIGKILL any that was committed, after a loss
of power the oldest that was not deleted yet, since that is deleted only once a newer
one is on the disk. None is found damaged. At its end each chain has the undisturbed
run's checksums of all arrays, as they are on the disk, and its metrics but for times.

A chain is repeated by its number and the seed; its moments are those of the scheduler.
Processes are forked from this one, which has imported everything: a start is shorter.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import fcntl
import functools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import free_address, report

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "digits.py"
SETTINGS = {
  "epochs": "4",
  "model": "MLP",
  "model.hidden": "(32,)",
  "log.every_steps": "3",
  "evaluation.every_epochs": "2",
  "checkpoint.every_epochs": "0.18",
  "checkpoint.keep_last": "1",
  "checkpoint.keep_best": "0",
}
MOMENTS = ("starting", "writing", "committed", "training")
MOST_KILLS = 8  # of a chain
ENDS_S = 300.0  # against hanging
# EXT4_IOC_SHUTDOWN, and its flag: the journal is not flushed either.
SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, struct.pack("I", 2)


class FaultError(AssertionError):
  """Error for a broken promise."""


def fork(work: Callable[[], Any], log: Path) -> int:
  """Start a process that calls a function, with its output in a file; return its id."""
  sys.stdout.flush()
  if pid := os.fork():
    return pid
  code = 1
  try:
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(number, 1)
    os.dup2(number, 2)
    work()
    code = 0
  except SystemExit as e:
    code = e.code if isinstance(e.code, int) else 1
  except BaseException:
    traceback.print_exc()
  finally:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def train(workdir: Path, devices: int, cache: Path, **env: str) -> None:
  """Train, as one process of a run."""
  import jax

  from jaxscale.errors import leave
  from jaxscale.train import main

  os.environ.update(env)
  os.chdir(ROOT)
  jax.config.update("jax_num_cpu_devices", devices)
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  sys.argv = ["train", "--config", str(CONFIG), "--workdir", str(workdir)]
  sys.argv += [f"--config.{name}={value}" for name, value in SETTINGS.items()]
  leave(main)


class Started:
  """The processes of one start of a run."""

  def __init__(self, workdir: Path, processes: int, cache: Path, log: Path):
    group: dict[str, str] = {}
    if processes > 1:
      group = {"JAXSCALE_COORDINATOR": free_address()}
      group |= {"JAXSCALE_NUM_PROCESSES": str(processes)}
    self.log, self.codes = log, dict[int, int]()
    self.pids = []
    for rank in range(processes):
      env = group | ({"JAXSCALE_PROCESS_ID": str(rank)} if group else {})
      work = functools.partial(train, workdir, 2 // processes, cache, **env)
      self.pids.append(fork(work, log))

  def running(self) -> list[int]:
    """Return the ids of processes that have not ended."""
    for pid in self.pids:
      if pid not in self.codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
          self.codes[pid] = os.waitstatus_to_exitcode(status)
    return [pid for pid in self.pids if pid not in self.codes]

  def kill(self, pids: list[int]) -> None:
    """Kill some of the processes with SIGKILL."""
    for pid in pids:
      os.kill(pid, signal.SIGKILL)

  def wait(self) -> None:
    """Wait until all processes have ended; fail if one does not."""
    until = time.monotonic() + ENDS_S
    while self.running():
      if time.monotonic() > until:
        self.kill(self.running())
        raise FaultError(f"not ended after {ENDS_S:g} s: {self.text()[-2000:]}")
      time.sleep(0.01)

  def text(self) -> str:
    """Return the output of all processes."""
    return self.log.read_text(errors="replace") if self.log.exists() else ""


def listing(workdir: Path) -> tuple[list[int], list[str]]:
  """Return the committed steps, and the names of checkpoints that are being written."""
  names: list[str] = []
  with contextlib.suppress(OSError):
    names = os.listdir(workdir / "checkpoints")
  return sorted(int(n) for n in names if n.isdigit()), [n for n in names if "tmp" in n]


def wait_for(moment: str, rng: random.Random, workdir: Path, run: Started) -> bool:
  """Wait for a random moment of a kind; return False if the run ends first."""
  steps, partial = listing(workdir)
  newest, passed = max(steps, default=0), 0
  wanted = rng.randint(1, 3)
  delay = rng.uniform(0, 3 if moment == "starting" else 0.1)
  while moment != "starting" and passed < wanted:
    if not run.running():
      return False
    steps, names = listing(workdir)
    if moment == "writing":
      passed += bool(set(names) - set(partial))
      partial = names
    elif steps and steps[-1] > newest:
      newest, passed = steps[-1], passed + 1
    time.sleep(0.003)
  if moment != "committed":
    time.sleep(delay * (0.2 if moment == "writing" else 1))
  return bool(run.running())


class Disk:
  """An ext4 file system in a file, with simulated losses of power."""

  def __init__(self, folder: Path):
    self.image, self.path = folder / "image", folder / "disk"
    self.losses = 0
    self.path.mkdir()
    with self.image.open("wb") as file:
      file.truncate(48 * 2**20)
    self._do("mkfs.ext4", "-q", "-F", str(self.image))
    self._mount()

  def _do(self, *command: str, codes: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in codes:
      raise OSError(None, f"{command[0]}: {done.stderr.strip() or done.returncode}")

  def _mount(self) -> None:
    self._do("mount", "-o", "loop", str(self.image), str(self.path))

  def lose_power(self) -> None:
    """Stop writing, and keep only synced data."""
    number = os.open(self.path, os.O_RDONLY)
    try:
      fcntl.ioctl(number, SHUTDOWN, NO_LOG_FLUSH)
    finally:
      os.close(number)

  def come_back(self) -> None:
    """Mount the contents of the device again, through another device.

    The old device would stay shut down if another mount namespace, such as a container's,
    has a copy of the mount.
    """
    self._do("umount", "-l", str(self.path))
    old, self.losses = self.image, self.losses + 1
    self.image = old.with_name(f"image-{self.losses}")
    self._do("cp", "--sparse=always", str(old), str(self.image))
    old.unlink()
    self._do("e2fsck", "-fy", str(self.image), codes=(0, 1))
    self._mount()

  def close(self) -> None:
    """Unmount the file system."""
    subprocess.run(["umount", "-l", str(self.path)], capture_output=True)


def open_disk(folder: Path) -> Disk | None:
  """Return a disk that can lose its power, or None (with a printed line) where none can be made."""
  try:
    return Disk(folder)
  except OSError as e:
    print(f"no loss of power: {e.strerror}", file=sys.stderr)
    return None


def outcome(workdir: Path, scratch: Path) -> dict[str, Any]:
  """Return checksums of the newest checkpoint's files, and all metrics."""

  def verify() -> None:
    from jaxscale.checkpoint import checkpoint_files

    steps, _ = listing(workdir)
    path = workdir / "checkpoints" / str(steps[-1])
    leaves = checkpoint_files.read_manifest(path)["leaves"]
    read = checkpoint_files.leaf_reader(path)
    sums = {name: [leaf["checksum"], read(name).size] for name, leaf in leaves.items()}
    target.write_text(json.dumps({"step": steps[-1], "sums": sums}))

  target, log = scratch / "sums.json", scratch / "verify.log"
  target.unlink(missing_ok=True)
  _, status = os.waitpid(fork(verify, log), 0)
  if status:
    raise FaultError(f"the last checkpoint: {log.read_text()[-2000:]}")
  found = json.loads(target.read_text())
  lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
  found["metrics"] = [
    kept
    for line in lines
    if len(kept := {k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")}) > 1
  ]
  return found


class Chain:
  """One run, killed repeatedly until it completes."""

  def __init__(self, seed: int, number: int, kinds: int, scratch: Path, cache: Path):
    self.rng = random.Random(f"{seed}/{number}")
    self.number, self.processes = number, 1 + number % 2
    self.on_disk = kinds > 1 and number // 2 % 2 == 0
    self.scratch, self.cache, self.kills = scratch, cache, []
    self.safe = 0  # the newest step that no loss of power takes

  def run(self, most: int, disk: Disk | None) -> dict[str, Any]:
    """Kill the run at most `most` times, then let it complete; return the outcome."""
    base = disk.path if disk and self.on_disk else self.scratch
    workdir, durable, starts = base / f"run-{self.number}", 0, 0
    shutil.rmtree(workdir, ignore_errors=True)
    while True:
      log = self.scratch / f"log-{self.number}-{starts}"
      log.unlink(missing_ok=True)
      run, starts = Started(workdir, self.processes, self.cache, log), starts + 1
      killed = len(self.kills) < most and self._kill(run, workdir, disk)
      if not killed:
        run.wait()
      self._check(run, durable, workdir)
      if not killed:
        break
      durable = self.kills[-1]["kept"]
    if set(run.codes.values()) != {0}:
      raise FaultError(f"ended with {run.codes}: {run.text()[-2000:]}")
    found = outcome(workdir, self.scratch)
    shutil.rmtree(workdir, ignore_errors=True)
    return found

  def _kill(self, run: Started, workdir: Path, disk: Disk | None) -> bool:
    moment = self.rng.choice(MOMENTS)
    loses_power = bool(disk) and self.on_disk and self.rng.random() < 0.5
    if not wait_for(moment, self.rng, workdir, run):
      return False
    steps, partial = listing(workdir)
    kill = {"moment": moment, "power": loses_power, "writing": bool(partial)}
    # The newest may not be on the disk yet: only then is an older one deleted.
    self.safe = max(self.safe, steps[0] if len(steps) > 1 else 0)
    if loses_power:
      assert disk
      kill["durable"] = self.safe
      disk.lose_power()
      run.kill(run.running())
      run.wait()
      disk.come_back()
    else:
      run.kill([self.rng.choice(run.running())])
      run.wait()
      # What was committed is there, and what others commit while they leave.
      kill["durable"] = steps[-1] if steps else 0
    self.kills.append(kill)
    newest = max(listing(workdir)[0], default=0)
    if newest < kill["durable"]:
      raise FaultError(f"step {kill['durable']} was durable, {newest} is the newest")
    kill["kept"] = newest
    self.safe = newest if loses_power else self.safe
    return True

  def _check(self, run: Started, durable: int, workdir: Path) -> None:
    text = run.text()
    if "damaged" in text:
      raise FaultError(f"a checkpoint was found damaged: {text[-2000:]}")
    resumed = re.search(r"resuming from the checkpoint of step (\d+)", text)
    if resumed and int(resumed[1]) < durable:
      raise FaultError(f"resumed from {resumed[1]}, {durable} was durable")


@contextlib.contextmanager
def scratch_folder(directory: Path | None) -> Iterator[tuple[Path, Disk | None]]:
  # Not a TemporaryDirectory, which forked processes would delete at their ends.
  if directory:
    directory.mkdir(parents=True, exist_ok=True)
  folder = Path(tempfile.mkdtemp(dir=directory))
  disk = open_disk(folder)
  try:
    yield folder, disk
  finally:
    if disk:
      disk.close()
    shutil.rmtree(folder, ignore_errors=True)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
  """Run chains until enough kills are done; return counts and failures."""
  import orbax.checkpoint  # noqa: F401

  import jaxscale.experiment.build
  import jaxscale.run.fit  # noqa: F401

  counts: dict[str, int] = collections.Counter()
  failed: list[dict[str, Any]] = []
  lost, done, number = 0, 0, 0 if asked.only is None else asked.only
  with scratch_folder(asked.directory) as (scratch, disk):
    cache, began = asked.cache or scratch / "cache", time.monotonic()
    whole: dict[int, Any] = {}
    for processes in (1, 2):
      chain = Chain(asked.seed, processes - 1, 1, scratch, cache)
      whole[processes] = chain.run(0, None)
    while done < asked.kills:
      chain = Chain(asked.seed, number, 1 + bool(disk), scratch, cache)
      try:
        most = min(MOST_KILLS, asked.kills - done)
        if chain.run(most, disk) != whole[chain.processes]:
          raise FaultError("the end has other bits than the undisturbed run")
      except (FaultError, OSError, ValueError) as e:
        failed.append({"chain": number, "why": f"{type(e).__name__}: {e}"})
      for kill in chain.kills:
        kind = "power" if kill["power"] else "SIGKILL"
        counts[kind] += 1
        counts[f"{kind} {kill['moment']}"] += 1
        counts[f"{kind}, {chain.processes} processes"] += 1
        counts[f"{kind} with a checkpoint half-written"] += kill["writing"]
        lost += kill.get("kept", kill["durable"]) > kill["durable"]
      done, number = done + max(len(chain.kills), 1), number + 1
      line = {"chain": number - 1, "processes": chain.processes, "kills": chain.kills}
      print(json.dumps(line), file=sys.stderr, flush=True)
      if failed and failed[-1]["chain"] == number - 1:
        print(f"FAILED {json.dumps(failed[-1])}", file=sys.stderr, flush=True)
      if asked.only is not None:
        break
    seconds = round(time.monotonic() - began)
  return {
    "kills": sum(counts[k] for k in ("power", "SIGKILL")),
    "chains": number,
    "seed": asked.seed,
    "counts": dict(sorted(counts.items())),
    "failed": failed,
    "newer_than_durable": lost,
    "seconds": seconds,
  }


def main() -> int:
  parser = argparse.ArgumentParser(description="Runs that are killed, again and again.")
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--only", type=int, help="the chain of this number, alone")
  parser.add_argument("--directory", type=Path, help="for workdirs and the disk")
  parser.add_argument("--cache", type=Path, help="of compiled programs, kept")
  parser.add_argument("--print", action="store_true", help="write no file")
  asked = parser.parse_args()
  found = measure(asked)
  report("random_kills", keep=not asked.print and asked.only is None, **found)
  return 1 if found["failed"] else 0


if __name__ == "__main__":
  sys.exit(main())
