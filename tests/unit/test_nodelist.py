"""Slurm's node lists: names that are written out here, and those of Slurm itself."""

import shutil
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.cluster.schedulers import nodelist, slurm
from support.errors import config_error
from support.tables import words

# Names written out by hand.
LISTS = {
  "n[7]": ["n7"],
  "node7": ["node7"],
  "n1,n3": ["n1", "n3"],
  "n[1-3]": ["n1", "n2", "n3"],
  "node[008-011]": ["node008", "node009", "node010", "node011"],
  "n[9-10]": ["n9", "n10"],
  "n[01-2]": ["n01", "n02"],
  "n[999-1001]": ["n999", "n1000", "n1001"],
  "nid[000012,000017-000018]": ["nid000012", "nid000017", "nid000018"],
  "login,gpu[2-3],n[1,4]x": ["login", "gpu2", "gpu3", "n1x", "n4x"],
  "rack[1-2]n[1-4]": [f"rack{r}n{n}" for r in (1, 2) for n in (1, 2, 3, 4)],
  "r[1-2][3,5]": ["r13", "r15", "r23", "r25"],
  "node[1-2]-ib": ["node1-ib", "node2-ib"],
  "n[1-2].example.org": ["n1.example.org", "n2.example.org"],
  "x1000c[0-1]s[0-7]b0n0": [f"x1000c{c}s{s}b0n0" for c in (0, 1) for s in range(8)],
  "r[1-2]c[01-02]n[3,5]": [f"r{r}c0{c}n{n}" for r in (1, 2) for c in (1, 2) for n in (3, 5)],
  "gpu-a[00-02]-hsn0,gpu-b7": ["gpu-a00-hsn0", "gpu-a01-hsn0", "gpu-a02-hsn0", "gpu-b7"],
  "[01-02]": ["01", "02"],
  "n1,n1": ["n1", "n1"],
  " n1,\nn[2-3] ": ["n1", "n2", "n3"],
}
MALFORMED = ["", " , "]
MALFORMED += words("n[1- n[1-2 n]1 n1] n[] n[1,] n[3-1] n[a-c] n[1a] n[1-5-7] n[[1-2]]")
MALFORMED += words("n[1-2]] n[1-3:2] n[-2] n[١-٢] n[1-100000] n[1-9999]m[1-9999]")


@pytest.mark.parametrize("text", LISTS)
def test_names_of_a_list(text):
  assert nodelist.expand(text) == LISTS[text]


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("parse", [nodelist.expand, slurm.hostnames])
def test_a_malformed_list_is_reported(text, parse):
  with config_error(match=r"node list .*: .*; give names as in") as e:
    parse(text)
  assert len(str(e.value)) < 200


NUMBERS = st.lists(st.integers(0, 120), min_size=1, max_size=4)
NAMES = st.tuples(st.sampled_from(["n", "rack", "a-"]), NUMBERS, st.sampled_from(["", "-ib", "b0"]))


@given(st.lists(NAMES, min_size=1, max_size=3))
def test_what_is_written_short_comes_back(items):
  text = ",".join(f"{p}[{','.join(map(str, ns))}]{s}" for p, ns, s in items)
  assert nodelist.expand(text) == [f"{p}{n}{s}" for p, ns, s in items for n in ns]


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
  if not shutil.which("scontrol"):
    pytest.skip("scontrol is not installed (apt-get install slurm-client)")
  conf = tmp_path / "slurm.conf"
  conf.write_text("ClusterName=c\nSlurmctldHost=localhost\nNodeName=a\nPartitionName=p Nodes=a\n")
  monkeypatch.setenv("SLURM_CONF", str(conf))


@pytest.mark.parametrize("text", LISTS)
def test_slurm_says_the_same(text, scontrol):
  command = ["scontrol", "show", "hostnames", text]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  if "Invalid hostlist" in done.stderr:  # 22.05: no suffix after a bracket
    assert done.stdout == "" and "[" in text
    assert slurm.hostnames(text) == LISTS[text]
    return
  names = done.stdout.split()
  # 22.05 lets the second of three brackets run slowest; the first name is the same.
  assert sorted(names) == sorted(LISTS[text]) and names[0] == LISTS[text][0]
  if text.count("[") < 3:
    assert names == LISTS[text]
  assert slurm.hostnames(text) == names


def fake(tmp_path, monkeypatch, body):
  """Write a program called scontrol with this body."""
  path = tmp_path / "scontrol"
  path.write_text(f"#!{sys.executable}\n{body}\n")
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  monkeypatch.setenv("PATH", str(tmp_path))


def test_slurm_is_asked_first(tmp_path, monkeypatch):
  fake(tmp_path, monkeypatch, "import sys; print(sys.argv[3], 'asked')")
  assert slurm.hostnames("n1") == ["n1"]  # nothing to ask
  fake(tmp_path, monkeypatch, "print('as\\nscontrol\\nsays')")
  assert slurm.hostnames("n[1-2]") == ["as", "scontrol", "says"]


NO_ANSWER = {
  "prints nothing": "",
  "fails": "print('n9'); raise SystemExit(1)",
  "prints half a bracket": "print('n]')",
  "hangs": "import time; time.sleep(100)",
}


@pytest.mark.parametrize("body", NO_ANSWER.values(), ids=NO_ANSWER)
def test_without_slurms_answer_we_parse(tmp_path, monkeypatch, body):
  fake(tmp_path, monkeypatch, body)
  begin = time.monotonic()
  assert slurm.hostnames("n[1-2]") == ["n1", "n2"]
  assert time.monotonic() - begin < 60
