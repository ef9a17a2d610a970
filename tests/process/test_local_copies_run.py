"""Two processes: killed between shared saves, or what only one of them lacks."""

import sys

import pytest

from jaxscale.files import read_json
from support.commands import own_lines
from support.processes import killed_at_end, run_group, start_group, wait_until
from support.tiny_runs import assert_same_run, command, newest_step, run_processes


def copied_step(workdir):
  return read_json(workdir / "checkpoints" / "local.json").get("step", 0)


@pytest.mark.slow
@pytest.mark.optimized
def test_killed_processes_resume_from_their_nodes_bit_for_bit(tmp_path):
  workdir, whole, node = tmp_path / "run", tmp_path / "whole", tmp_path / "node"
  node.mkdir()
  copies = f"--config.checkpoint.local={node}", "--config.checkpoint.shared_every=999"
  for _, err, code in run_processes(whole, 2, 1):
    assert code == 0, err
  with killed_at_end(*start_group(command(workdir, *copies))) as group:
    wait_until(lambda: copied_step(workdir) > newest_step(workdir) > 0, group[0])
  copied = copied_step(workdir)
  assert copied > newest_step(workdir) > 0
  (out, err, code), (_, err1, code1) = run_processes(workdir, 2, 1, *copies)
  assert (code, code1) == (0, 0), err + err1
  assert f"resuming from the checkpoint of step {copied}" in out
  assert_same_run(workdir, whole)
  assert not list(node.iterdir())  # of a run that is done
  assert not copied_step(workdir)


# The node of one process is replaced, the state of one holds NaN, the folder of one is
# full: what one cannot do, none does.
PAIR = """
import resource, sys; sys.path[:0] = ["tests"]
from pathlib import Path
from jaxscale import cluster
cluster.initialize()
import jax; jax.config.update("jax_num_cpu_devices", 1)
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.errors import NonFiniteError
from jaxscale.metrics.log import LineHandler, logger
from support.states import at_step, make_states
from support.trees import assert_same_bits

folder, me = Path(sys.argv[1]), jax.process_index()
logger.addHandler(LineHandler()); logger.setLevel("CRITICAL" if me else "INFO")
abstract, state = make_states(2)
shardings = jax.tree.map(lambda x: x.sharding, state)
make = jax.jit(at_step, out_shardings=shardings)

def opened():
  return Checkpoints(folder / "shared", local=folder / "node", shared_every=9)

def save(checkpoints, *steps):
  for step in steps:
    checkpoints.save(make(state, step), is_needed=False); checkpoints.wait()

def restored(checkpoints):
  found = checkpoints.restore(abstract)
  wanted = make(state, int(found.step))
  assert_same_bits(*(jax.tree.map(lambda x: x.addressable_data(0), x)
                     for x in (found, wanted)))
  return int(found.step)

checkpoints = opened()
save(checkpoints, 1, 2, 3)
checkpoints.__exit__(KeyboardInterrupt)
print("restored", restored(opened()))
if me == 1:
  for path in folder.glob("node/*/1-*-3"): path.unlink()
cluster.barrier("gone")
checkpoints = opened()
print("restored", restored(checkpoints))
save(checkpoints, 4, 5)
bad = make(state, 6)
bad = bad._replace(params=jax.tree.map(lambda x: x * float("nan"), bad.params))
try: checkpoints.save(bad, is_needed=False); checkpoints.wait()
except NonFiniteError as e: print(e)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
checkpoints.save(make(state, 7), is_needed=False)
checkpoints.wait()
if me == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
checkpoints.save(make(state, 8), is_needed=False)
checkpoints._local.finish()
if me == 1: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
save(checkpoints, 9)
print(checkpoints.newest(), checkpoints.steps())
checkpoints.__exit__(None)
cluster.barrier("end")
"""


@pytest.mark.slow
def test_what_one_process_lacks_none_resumes_from(tmp_path):
  (tmp_path / "node").mkdir()
  ended = run_group([sys.executable, "-c", PAIR, str(tmp_path)])
  assert [code for *_, code in ended] == [0, 0], ended
  first, second = (own_lines(out) for out, *_ in ended)
  lines = [line for line in first if "local cop" in line]
  assert [x for x in first if x not in lines] == second
  assert second[:2] == ["restored 3", "restored 1"]
  assert "are not finite at step 6" in second[2] and second[3] == "9 [4, 9]"
  assert lines[0].startswith("the local copy of step 3 cannot be used: the file does not exist")
  assert "(process 1 on " in lines[0]
  assert lines[1].startswith("local copies are disabled: File too large, in process 1 on ")
  assert len(lines) == 2 and not list((tmp_path / "node").glob("*/*"))
