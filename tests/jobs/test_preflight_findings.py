"""Findings of the preflight, from hand-made measurements."""

from jaxscale import cli
from jaxscale.cluster.group import Group
from jaxscale.jobs import preflight
from jaxscale.jobs.preflight import software
from jaxscale.jobs.preflight.finding import Finding, report
from support.commands import run_python
from support.preflight_process import wrong

HOSTS = ("n1", "n2", "n3", "n4", "n5")


def judged(check, results, hosts):
  return check.findings(results, Group(0, hosts, {}), preflight.Options(), {})


def has(**other):
  """Return the measurements of a process without problems."""
  good = dict(versions={"jax": "0.10.2"}, hostname="n1", loopback="", network="a", gpus=[])
  good |= dict(files=[1024, 4096], locked=-1, infiniband=True, shm=1 << 33)
  return good | other


def test_versions_limits_and_names_are_judged():
  def reported(*found):
    return wrong(judged(software, found, HOSTS[: len(found)]))

  assert not reported(has(), has(hostname="n2"))
  assert reported(has(), has(), has(versions={"jax": "0.10.1"})) == [
    "jax 0.10.1 on process 2 (n3), 0.10.2 on the others"
  ]
  found = has(), has(hostname="n2", loopback="127.0.1.1", network="b")
  (text,) = reported(*found)
  assert text.startswith("n2: its own name resolves to 127.0.1.1 there")
  assert not reported(has(loopback="127.0.1.1"), has(loopback="127.0.1.1"))  # one host
  # Two by name alone, as in tests: loopback leads from one to the other.
  assert not reported(has(loopback="127.0.0.11"), has(hostname="n2", loopback="127.0.0.12"))
  assert reported(has(), has(hostname="n2", loopback="nothing (Name or service not known)"))
  assert "n1: only 8.4 MB of memory may be locked" in reported(has(locked=1 << 23))[0]
  assert not reported(has(locked=1 << 23, infiniband=False))
  assert not reported(has(files=[200, 4096]))  # a run raises that itself
  assert "n1: at most 200 open files are allowed" in reported(has(files=[99, 200]))[0]
  gpu = {"index": "0", "used": 0, "total": 1 << 36, "errors": 0, "processes": []}
  assert not reported(has(gpus=[gpu]))
  assert "n1: /dev/shm has only 67.1 MB" in reported(has(gpus=[gpu], shm=1 << 26))[0]


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
  assert wrong(judged(software, found, ("n1", "n1"))) == [
    "GPU 1 of n1: 32.2 GB in use by process 4242 (python, 30716 MiB)",
    "GPU 2 of n1: 21.5 GB in use by an invisible process",
    "GPU 3 of n1: 2 uncorrected memory errors since it was reset",
  ]
  for chosen, left in (("0", "0"), ("GPU-aa, GPU-dd", "03"), ("", ""), ("2,1", "12")):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert "".join(gpu["index"] for gpu in software.nvidia()[1]) == left


def test_gpus_of_amd_are_read_from_their_driver(tmp_path):
  files = {"mem_info_vram_total": "206141652992", "mem_info_vram_used": "297340928"}
  for number, more in ((128, {}), (129, {"mem_info_vram_used": "90000000000"}), (130, {})):
    folder = tmp_path / f"sys/class/drm/renderD{number}/device"
    (folder / "ras").mkdir(parents=True)
    for name, text in (files | more).items():
      (folder / name).write_text(f"{text}\n")
    (folder / "ras/umc_err_count").write_text(f"ue: {3 * (number == 130)}\nce: 1\n")
    device = tmp_path / f"dev/dri/renderD{number}"
    device.parent.mkdir(parents=True, exist_ok=True)
    device.touch()
  (tmp_path / "sys/class/drm/renderD131/device").mkdir(parents=True)  # an Intel GPU
  gpus = software.amd(str(tmp_path))
  assert [gpu["total"] for gpu in gpus] == 3 * [206141652992]
  assert wrong(judged(software, (has(gpus=gpus),), ("n1",))) == [
    "GPU renderD129 of n1: 90.0 GB in use by an invisible process",
    "GPU renderD130 of n1: 3 uncorrected memory errors since it was reset",
  ]
  (tmp_path / "dev/dri/renderD129").unlink()
  assert len(software.amd(str(tmp_path))) == 2


def test_a_name_of_the_own_host_is_looked_up(monkeypatch):
  assert software.loopback("127.0.1.1") == "127.0.1.1"
  assert software.loopback("192.0.2.7") == ""
  assert software.loopback("no-such-host.invalid").startswith("nothing (")


def test_findings_become_lines_remedies_and_a_code(capsys):
  slow, off = (Finding(False, f"n3 is {how}", "leave n3 out") for how in ("slow", "off"))
  reported = [Finding(True, "fine"), slow, off]
  assert report(reported) is None
  out = capsys.readouterr().out
  assert out == "ok    fine\nfail  n3 is slow\nfail  n3 is off\nfix   leave n3 out\n"
  assert report(reported[:1]) is None
  assert capsys.readouterr().out.endswith("preflight: ready\n")


def test_options_are_read_or_refused(monkeypatch, capsys):
  asked = []
  monkeypatch.setattr(preflight, "check", lambda options: asked.append(options) or 0)
  argv = ["--workdir=w", "--skip", "devices,disk", "--config", "c.py", "--config.a=1"]
  assert cli.main(["doctor", *argv]) == 0
  (options,) = asked
  assert (str(options.workdir), options.config) == ("w", "c.py")
  assert options.skip == ("devices", "disk") and options.overrides == {"a": "1"}
  for argv, says in (
    (["--skip=devcies"], "did you mean 'devices'?"),
    (["--skip"], "a value is missing"),
    (["--config.a=1"], "needs --config FILE; add it"),
    (["--wordir=x"], "did you mean '--workdir'?"),
    (["imagenet"], "imagenet: not an option; give a config as --config FILE"),
  ):
    assert cli.main(["doctor", *argv]) == 2
    assert says in capsys.readouterr().err


def test_help_lists_the_checks(capsys):
  assert cli.main(["doctor", "--help"]) == 0
  assert "disk (room for checkpoints" in " ".join(capsys.readouterr().out.split())


def test_the_preflight_is_imported_without_jax():
  code = "import sys, jaxscale.jobs.preflight, jaxscale.cli.doctor; print('jax' in sys.modules)"
  done = run_python("-c", code)
  assert done.stdout == "False\n", done.stderr
