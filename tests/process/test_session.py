"""`cluster.open_session` in real processes: how it begins, and how it ends."""

import contextlib
import os
import platform
import signal
import subprocess
import sys

import pytest

from support.commands import child_env, own_lines
from support.processes import free_port, killed_at_end, popen, run_group
from support.tables import assignments

POD = """
import os, sys, time
from pathlib import Path
import jax
from jaxscale import cluster
from jaxscale.cluster import detect, host_collectives
from jaxscale.cluster.launch import Launch
# A TPU pod whose processes only JAX can count; what its chips say is set here.
detect.detect = lambda env: Launch("tpu", 0, 0)
found, (address, rank, *workdir) = jax.distributed.initialize, sys.argv[1:]
jax.distributed.initialize = lambda **given: found(address, 2, int(rank), **given)
sent, gather = [], host_collectives.gather_openly
def gather_openly(value):
  sent.append(value)
  return gather(value)
host_collectives.gather_openly = gather_openly
def main():
  with cluster.open_session(folder=Path(workdir[0], "faults") if workdir else None) as watch:
    run(watch)
def run(watch):
  assert watch.is_watched and jax.process_count() == 2
  print("up", jax.process_index(), flush=True)
  step = 0
  while not (why := watch.stop.poll()):
    step += 1
    watch.at(step, "step")
    cluster.barrier(f"{step}")
  assert not workdir or not os.listdir(workdir[0])
  print("stopped", why, step, max(len(str(value)) for value in sent), flush=True)
from jaxscale.errors import one_line_errors
sys.exit(one_line_errors(main)())
"""

BATCH = """
import os, sys
from jaxscale import cluster
with cluster.open_session():
  from jax.experimental.multihost_utils import process_allgather
  process_allgather(1.0)  # Gloo's threads have begun
  threads = map(int, os.listdir("/proc/self/task"))
  print(*{os.sched_getscheduler(thread) for thread in threads}, flush=True)
"""

ARRAYS = """
import resource
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from jaxscale import cluster

def pages():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with cluster.open_session(), ThreadPoolExecutor(2) as threads:
  for _ in range(4):  # all that is ever in use at a time
    list(threads.map(np.ones, [2**21, 2**23]))
  before = pages()
  for _ in range(4):
    list(threads.map(np.ones, [2**21, 2**23]))
  print(pages() - before, flush=True)
"""


@pytest.fixture
def start():
  """Yield a function that starts processes, which end with the test."""
  with contextlib.ExitStack() as stack:

    def begin(code, *args, **env):
      command, env = [sys.executable, "-c", code, *args], child_env(1, **env)
      return stack.enter_context(killed_at_end(popen(*command, env=env, stdin=subprocess.PIPE)))

    yield begin


def line_with(process, word):
  return next(line for line in process.stdout if word in line)


@pytest.mark.parametrize("source", ["variable", "file", "neither"])
def test_where_only_jax_knows_the_others_they_connect_after_it(start, tmp_path, source):
  """The run's secret goes over JAX's connections only if there is no other way."""
  port, variable = free_port(), {"JAXSCALE_SECRET": "s" * 32 if source == "variable" else ""}
  workdir = [str(tmp_path)] * (source == "file")
  pair = [start(POD, f"127.0.0.1:{port}", str(rank), *workdir, **variable) for rank in range(2)]
  for rank, process in enumerate(pair):
    assert f"up {rank}" in line_with(process, "up")
  pair[1].send_signal(signal.SIGUSR1)
  ends = [process.communicate(timeout=200) for process in pair]
  assert [process.returncode for process in pair] == [0, 0], ends
  reported = [own_lines(out)[-1] for out, _ in ends]
  assert reported[0] == reported[1]
  assert reported[0].startswith(f"stopped SIGUSR1 at process 1 on {os.uname().nodename} ")
  assert (int(reported[0].split()[-1]) >= 64) == (source == "neither")
  warned = [line for line in ends[0][1].splitlines() if "open connections" in line]
  assert (
    warned
    == [
      "warning: other users may know the run's secret, which went over JAX's open connections, "
      "because process 0 cannot read it from a file (the session has no workdir); set "
      "JAXSCALE_SECRET to the same 64 random hex digits in all processes"
    ]
    * (source == "neither")
    and "open" not in ends[1][1]
  )


EXIT = """
import sys
from jaxscale import cluster
with cluster.open_session():
  sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 7])
def test_who_exits_has_its_exit_code(code):
  ends = run_group([sys.executable, "-c", EXIT, str(code)])
  assert [end[2] for end in ends] == [code, code], ends
  assert "error" not in ends[0][1] or code


WRONG = """
import sys
from jaxscale import cluster
from jaxscale.errors import ConfigError
def main():
  with cluster.open_session():
    import jax
    print("up", flush=True)
    sys.stdin.readline()
    if sys.argv[1:] == ["both"] or jax.process_index() == 1:
      raise ConfigError("--config.x=1: no good")
    cluster.barrier("forever")
main()
"""


@pytest.mark.parametrize("who", ["both", "one"])
def test_what_all_say_is_printed_once_and_what_one_says_has_its_name(start, who):
  common = {"JAXSCALE_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXSCALE_NUM_PROCESSES": "2"}
  pair = [start(WRONG, who, **common, JAXSCALE_PROCESS_ID=str(rank)) for rank in range(2)]
  for process in pair:
    line_with(process, "up")
  for process in pair:
    process.stdin.write("go\n")
    process.stdin.flush()
  (_, told), (_, other) = (process.communicate(timeout=200) for process in pair)
  assert [process.returncode for process in pair] == [2, 2] and not other, other
  of = "" if who == "both" else f"process 1 on {os.uname().nodename}: "
  assert told == f"error: {of}--config.x=1: no good\n"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's")
@pytest.mark.parametrize("policy", ["SCHED_OTHER", "SCHED_IDLE"])
def test_cpu_processes_are_under_the_batch_policy_or_the_user_s(policy):
  """A collective of a process with one core took a tick of the scheduler."""
  own = getattr(os, policy)
  code = f"import os; os.sched_setscheduler(0, {own}, os.sched_param(0))\n{BATCH}"
  expected = os.SCHED_BATCH if policy == "SCHED_OTHER" else own
  for out, err, ended in run_group([sys.executable, "-c", code]):
    assert out.split()[-1:] == [str(expected)] and ended == 0, err


OF_ONES_OWN = ["MALLOC_ARENA_MAX=8", "JAX_NUM_CPU_DEVICES=2"]
OF_ONES_OWN += ["XLA_FLAGS=--xla_force_host_platform_device_count=2"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's")
@pytest.mark.parametrize("setting", ["", *OF_ONES_OWN])
def test_a_process_with_one_cpu_device_keeps_its_memory(start, setting):
  """An array of 64 MiB, which has 16,384 pages, and a smaller one, four times."""
  env = assignments(setting) | {"NUMPY_MADVISE_HUGEPAGE": "0"}
  out, err = start(ARRAYS, **env).communicate(timeout=200)
  pages = int(out.split()[-1])
  assert pages > 60_000 if setting else pages < 8_000, err
