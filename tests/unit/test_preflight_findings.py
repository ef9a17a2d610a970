"""What the preflight makes of what it has measured, by hand-made measurements."""

import itertools
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxscale import cli, preflight
from jaxscale.preflight import clocks, network, software
from jaxscale.preflight.finding import Finding, report
from jaxscale.preflight.network import Speed
from support.commands import child_env
from support.paths import ROOT
from support.preflight_process import wrong

HOSTS = ("n1", "n2", "n3", "n4", "n5")
GOOD = 1e9, 1e9  # bytes/s each way


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 17, 64])
def test_rounds_hold_every_pair_once_and_nobody_twice(number):
  members = [10 * m for m in range(number)]
  found = network.rounds_of(members)
  assert sorted(itertools.chain(*found)) == list(itertools.combinations(members, 2))
  for pairs in found:
    assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)
  if number > 1:
    assert len(found) == number - 1 + number % 2


def speeds(bad=(), hosts=5, rate=GOOD, trip=30e-6, **other):
  """All pairs of some hosts alike, but for the bad ones."""
  found = []
  for pair in itertools.combinations(range(hosts), 2):
    usual = Speed(*pair, 30e-6, *GOOD)
    there, back = rate
    changed = usual._replace(there=there, back=back, round_trip_s=trip, **other)
    found.append(changed if pair in bad or set(pair) & set(bad) else usual)
  return found


def findings_of(found, **limits):
  measured = network.Measurement(found, 4, 4)
  return network.findings(measured, HOSTS, network.NetworkLimits(**limits))


def test_the_network_is_judged_by_its_median():
  (reported,) = findings_of(speeds())
  assert reported.ok and "10 pairs of hosts, median 1.0 GB/s" in reported.text
  assert "30 us round trip" in reported.text
  assert not wrong(findings_of(speeds([(1, 3)], rate=(0.4e9, 1e9))))  # another rack
  (reported,) = wrong(findings_of(speeds([(1, 3)], rate=(0.2e9, 1e9))))
  assert reported == (
    "network: n2 and n4: 200.0 MB/s there, 1.0 GB/s back, 30 us round trip; the "
    "median of all pairs is 1.0 GB/s and 30 us"
  )
  (reported,) = wrong(findings_of(speeds([(1, 3)], trip=2e-3)))
  assert reported.startswith("network: n2 and n4") and "2.0 ms round trip" in reported
  (reported,) = wrong(findings_of(speeds([(1, 3)], error="Connection refused")))
  assert reported == "network: n2 and n4 do not reach each other: Connection refused"


def test_slow_nodes_are_found_one_by_one():
  (reported,) = wrong(findings_of(speeds([2], rate=(0.1e9, 0.1e9))))
  assert reported == (
    "network: n3: 4 of 4 pairs are slow, 100.0 MB/s and 30 us where the median has "
    "1.0 GB/s and 30 us"
  )
  # Seven of ten pairs are slow by two nodes, against the three of the rest.
  both = wrong(findings_of(speeds([1, 4], error="no answer in 3 s")))
  assert [x[:12] for x in both] == ["network: n2:", "network: n5:"]
  assert both[0].endswith("4 of 4 pairs do not connect (no answer in 3 s)")
  # Of two hosts, nobody can say which it is; and there is no median to go by.
  two = speeds(hosts=2, bad=[(0, 1)], rate=(50e6, 1e9))
  (reported,) = wrong(findings_of(two))
  assert reported.startswith("network: n1 and n2: 50.0 MB/s there")
  assert not wrong(findings_of(two, least=40e6))


def test_rounds_that_were_left_out_are_reported():
  measured = network.Measurement(speeds(), 64, 1023)
  (reported,) = network.findings(measured, HOSTS, network.NetworkLimits())
  assert reported.text.endswith(
    "64 of 1023 rounds in the time allowed (one TCP stream)"
  )
  (reported,) = network.findings(
    network.Measurement([], 0, 0), HOSTS[:1], network.NetworkLimits()
  )
  assert reported == Finding(True, "network: all processes are on n1")


def test_a_measurement_takes_about_as_long_as_it_may():
  class Throttled:  # 0.3 MB/s
    def __init__(self, sock):
      self._sock = sock

    def __getattr__(self, name):
      return getattr(self._sock, name)

    def sendall(self, block):
      time.sleep(len(block) / 0.3e6)
      self._sock.sendall(block)

  here, there = socket.socketpair()
  limits = network.NetworkLimits(seconds=0.1, most_bytes=1 << 24)
  with here, there:
    other = threading.Thread(target=network.follow, args=(there, limits))
    other.start()
    _, fast, throttled = network.lead(Throttled(here), limits)
    other.join()
  assert 0.15e6 < throttled < 0.31e6 and fast > 1e6


def test_a_clock_counts_as_off_only_beyond_what_the_question_took():
  assert not wrong(clocks.findings([clocks.Offset(1, 1.2, 0.6)], HOSTS))
  (reported,) = wrong(clocks.findings([clocks.Offset(1, -1.4, 0.6)], HOSTS))
  assert reported == "clock of n2: 1.40 s behind n1"
  assert clocks.findings([], HOSTS) == []


def has(**other):
  """What a process in good order says of itself."""
  good = {"versions": {"jax": "0.10.2"}, "hostname": "n1", "loopback": "", "place": "a",
          "files": [1024, 4096], "locked": -1, "infiniband": True, "shm": 1 << 33,
          "gpus": []}  # fmt: skip
  return good | other


def test_versions_limits_and_names_are_judged():
  def reported(*found):
    return wrong(software.findings(found, HOSTS[: len(found)]))

  assert not reported(has(), has(hostname="n2"))
  assert reported(has(), has(), has(versions={"jax": "0.10.1"})) == [
    "jax 0.10.1 on process 2 (n3), 0.10.2 on the others"
  ]
  found = has(), has(hostname="n2", loopback="127.0.1.1", place="b")
  (text,) = reported(*found)
  assert text.startswith("n2: its own name resolves to 127.0.1.1 there")
  assert not reported(has(loopback="127.0.1.1"), has(loopback="127.0.1.1"))  # one host
  # Two by name alone, as in tests: loopback leads from one to the other.
  assert not reported(
    has(loopback="127.0.0.11"), has(hostname="n2", loopback="127.0.0.12")
  )
  assert reported(
    has(), has(hostname="n2", loopback="nothing (Name or service not known)")
  )
  assert "n1: 8.4 MB of memory may be locked" in reported(has(locked=1 << 23))[0]
  assert not reported(has(locked=1 << 23, infiniband=False))
  assert not reported(has(files=[200, 4096]))  # a run raises that itself
  assert "n1: 200 open files are allowed at most" in reported(has(files=[99, 200]))[0]
  gpu = {"index": "0", "used": 0, "total": 1 << 36, "errors": 0, "processes": []}
  assert not reported(has(gpus=[gpu]))
  assert "n1: /dev/shm has 67.1 MB" in reported(has(gpus=[gpu], shm=1 << 26))[0]


SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat <<END
0, GPU-aaaa-1, NVIDIA H200, 570.86.15, 4, 143771, 0
1, GPU-bbbb-2, NVIDIA H200, 570.86.15, 30720, 143771, 0
2, GPU-cccc-3, NVIDIA H200, 570.86.15, 20480, 143771, [N/A]
3, GPU-dddd-4, NVIDIA H200, 570.86.15, 4, 143771, 2
END
  ;;
  --query-compute-apps=*) echo "GPU-bbbb-2, 4242, 30716, python" ;;
esac
"""


def test_gpus_that_others_use_are_named(tmp_path, monkeypatch):
  smi = tmp_path / "nvidia-smi"
  smi.write_text(SMI)
  smi.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  driver, gpus = software.nvidia()
  assert driver == "570.86.15" and len(gpus) == 4
  # Two processes of one host see the same GPUs, and say it once.
  found = has(gpus=gpus), has(gpus=gpus)
  assert wrong(software.findings(found, ("n1", "n1"))) == [
    "GPU 1 of n1: 32.2 GB in use by process 4242 (python, 30716 MiB)",
    "GPU 2 of n1: 21.5 GB in use by a process that is not visible",
    "GPU 3 of n1: 2 uncorrected memory errors since it was reset",
  ]
  for chosen, left in (("0", "0"), ("GPU-aa, GPU-dd", "03"), ("", ""), ("2,1", "12")):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert "".join(gpu["index"] for gpu in software.nvidia()[1]) == left


def test_a_name_of_the_own_host_is_looked_up(monkeypatch):
  assert software.loopback("127.0.1.1") == "127.0.1.1"
  assert software.loopback("192.0.2.7") == ""
  assert software.loopback("no-such-host.invalid").startswith("nothing (")


def test_findings_become_lines_remedies_and_a_code(capsys):
  remedy = "leave n3 out"
  reported = [Finding(True, "fine"), Finding(False, "n3 is slow", remedy),
          Finding(False, "n3 is off", remedy)]  # fmt: skip
  assert report("preflight", reported) == 2
  out = capsys.readouterr().out
  assert out == "ok    fine\nnot   n3 is slow\nnot   n3 is off\nnext  leave n3 out\n"
  assert report("preflight", reported[:1]) == 0
  assert capsys.readouterr().out.endswith("preflight: ready\n")


def test_options_are_read_or_refused(monkeypatch, capsys):
  asked = []
  monkeypatch.setattr(preflight, "check", lambda options: asked.append(options) or 0)
  argv = ["--workdir=w", "--skip", "network,disk", "--config", "c.py", "--config.a=1"]
  assert cli.main(["doctor", *argv]) == 0
  (options,) = asked
  assert (str(options.workdir), options.config) == ("w", "c.py")
  assert options.skip == ("network", "disk") and options.overrides == {"a": "1"}
  for argv, says in (
    (["--skip=netwrok"], "did you mean 'network'?"),
    (["--skip"], "a value is missing"),
    (["--config.a=1"], "give --config FILE too"),
    (["--wordir=x"], "did you mean '--workdir'?"),
  ):
    assert cli.main(["doctor", *argv]) == 2
    assert says in capsys.readouterr().err


def test_the_preflight_is_imported_without_jax():
  code = (
    "import sys, jaxscale.preflight, jaxscale.cli.doctor; print('jax' in sys.modules)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], env=child_env(PYTHONPATH=str(ROOT)),
    capture_output=True, text=True,
  )  # fmt: skip
  assert done.stdout == "False\n", done.stderr
