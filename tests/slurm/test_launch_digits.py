"""Digits trained by `jaxscale submit` on a real Slurm, and the preflight."""

import re
import shlex
import sys

import jax
import numpy as np
import pytest

from support.paths import ROOT
from support.slurm.cli import ends, until
from support.tiny_runs import ARGS, final_state

# No step is saved twice: what is compared is the last.
ONCE = [*ARGS, "--config.epochs=3", "--config.checkpoint.every_epochs=3"]


def test_digits_trains_on_a_node(cli):
  cli("submit", "--real", "--name=d", *ONCE)
  words = until(cli, "d", "COMPLETED")
  assert words[3:5] == ["1", "34/34"] and words[7].endswith("%")
  assert cli("logs", "d", "--lines=1").startswith("done: validation accuracy")
  assert re.fullmatch(r"goodput \d+% of .*training 0:\d\d.*", cli("status", "d").splitlines()[-1])


@pytest.mark.slow
def test_the_three_lines_of_the_readme_run(cli, slurm):
  section = (ROOT / "README.md").read_text().partition("## On Slurm\n\n```\n")[2]
  lines = [shlex.split(line) for line in section.partition("```")[0].splitlines()]
  assert [line[:2] for line in lines] == [["jaxscale", c] for c in ("submit", "status", "logs")]
  submit, status, logs = ([sys.executable, "-m", *line, f"--runs={cli.runs}"] for line in lines)
  slurm.run(*submit)
  assert "done: " in slurm.run(*logs).stdout  # -f: until the job ends
  status.remove("--watch")
  assert "COMPLETED" in slurm.run(*status).stdout


@pytest.mark.slow
def test_after_a_good_preflight_it_trains(cli):
  cli("submit", "--real", "--nodes=2", "--preflight", "--name=d", *ONCE)
  assert until(cli, "d", "COMPLETED")[3:5] == ["2", "34/34"]
  checked = cli("logs", "d", "--rank=batch")
  assert "2 processes on 2 hosts (n1 and n2)" in checked
  assert "preflight: ready" in checked


@pytest.mark.slow
def test_the_preflight_stops_a_bad_allocation_and_names_the_node(cli, slurm):
  """One node that has something else, read-only, where the others have the workdir."""
  slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")  # not yet
  cli("submit", "--real", "--nodes=2", "--preflight", "--name=d", *ONCE)
  workdir = cli.runs / "d" / "train"
  workdir.mkdir()
  slurm.run("mount", "-t", "tmpfs", "-o", "ro", "none", str(workdir), host="n2")
  try:
    slurm.run("scontrol", "update", "PartitionName=main", "State=UP")
    words = until(cli, "d", "FAILED")
  finally:
    slurm.run("umount", str(workdir), host="n2")
  reported = cli("logs", "d", "--rank=batch")
  assert words[3] == "2" and ends(cli, "d") == [(2, "stop")]
  assert "preflight found problems on this allocation" in reported
  wrong = [line for line in reported.splitlines() if line.startswith("fail ")]
  assert wrong and all("n2" in line for line in wrong), reported
  assert "n2 wrote 0 bytes" in wrong[-1] and "Read-only file system" in wrong[-1]
  assert "share, or mount it on n2" in reported
  assert not (workdir / "metrics.jsonl").exists()


@pytest.mark.slow
def test_digits_on_1_2_and_4_nodes_have_the_same_parameters(cli):
  """Nodes have two devices each; commands differ only in --nodes."""
  for nodes in (1, 2, 4):
    words = [f"--nodes={nodes}", f"--name={nodes}", *ONCE, "--config.log.every_steps=1"]
    cli("submit", "--real", *words, JAX_NUM_CPU_DEVICES="2")
    assert until(cli, str(nodes), "COMPLETED")[4] == "34/34"
  one, two, four = (final_state(cli.runs / str(n) / "train").params for n in (1, 2, 4))
  for other in (two, four):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())
