"""The preflight refuses a workdir that would lose checkpoints."""

import os
import subprocess
import textwrap

import pytest

from support.preflight_process import HOSTS, only, preflight, wrong

RENAMES = {
  "a file was": """
    def replace(source, target):
      text = open(source).read()
      with open(target, "w") as file:
        file.write(text[:50]); file.flush(); time.sleep(0.01); file.write(text[50:])
    fake.replace = replace
  """,
  "was missing for a moment": """
    def replace(source, target):
      real.unlink(target); time.sleep(0.01); real.rename(source, target)
    fake.replace = replace
  """,
  "a renamed directory appeared without": """
    def rename(source, target):
      real.mkdir(target); time.sleep(0.05)
      for name in real.listdir(source):
        real.rename(f"{source}/{name}", f"{target}/{name}")
    fake.rename = rename
  """,
  "a directory was renamed onto one that is not empty": """
    def rename(source, target):
      shutil.rmtree(target, ignore_errors=True); real.rename(source, target)
    fake.rename = rename
  """,
  "exclusive creation of a file succeeded on": """
    fake.open = lambda path, flags: real.open(path, flags & ~real.O_EXCL)
  """,
}


@pytest.mark.parametrize("says", RENAMES)
def test_a_file_system_that_breaks_promises_is_refused(tmp_path, says):
  patch = f"""
    import os as real, shutil, time, types
    from jaxscale.jobs.preflight import shared_files
    fake = types.SimpleNamespace(**vars(real))
    {textwrap.indent(textwrap.dedent(RENAMES[says]), "    ").strip()}
    shared_files.os = fake
  """
  findings = preflight(HOSTS[:3], only("files"), f"--workdir={tmp_path}", patch=patch)
  assert any(says in text for text in wrong(findings)), findings
  assert not list(tmp_path.iterdir())


def test_a_workdir_that_is_not_shared_is_refused(tmp_path):
  patch = f"""
    from pathlib import Path
    from jaxscale.jobs.preflight import shared_files
    shared_files.SEEN_S = 0.5
    real = shared_files.broadcast
    def enter(group, step, value):
      folder, error = real(group, step, value)
      local = Path({str(tmp_path)!r}) / f"local-{{rank}}" / Path(folder).name
      local.mkdir(parents=True)
      return str(local), error
    if rank == 2: shared_files.broadcast = enter
  """
  (reported,) = preflight(HOSTS[:3], only("files"), f"--workdir={tmp_path / 'w'}", patch=patch)
  assert not reported.ok and ": n3 and n1 do not see each other's files" in reported.text
  assert "mount it on n3" in reported.remedy


def test_a_host_whose_files_process_0_does_not_see_is_named(tmp_path):
  patch = """
    from jaxscale.jobs.preflight import shared_files
    shared_files.SEEN_S = 0.5
    if rank == 1: shared_files.attempt = lambda action: ""  # writes nothing
  """
  (reported,) = preflight(HOSTS[:2], only("files"), f"--workdir={tmp_path}", patch=patch)
  assert not reported.ok and ": n2 and n1 do not see each other's files" in reported.text


def test_a_workdir_that_cannot_be_made_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  workdir = tmp_path / "file" / "runs"
  (reported,) = preflight(HOSTS[:2], only("files", "disk"), f"--workdir={workdir}")
  assert reported.text == f"workdir {workdir}: Not a directory" and not reported.ok


def test_a_full_disk_is_found_by_writing(tmp_path):
  place = tmp_path / "small"
  place.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
  if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
    pytest.skip("a small file system needs root that may mount")
  try:
    reported, *_ = preflight(HOSTS[:2], only("disk"), f"--workdir={place}")
    assert "No space left on device" in reported.text and " MB of its part of " in reported.text
    assert not reported.ok and "268.4 MB are needed" in reported.remedy
    assert not list(place.iterdir())
  finally:
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_too_small_for_all_checkpoints_is_reported(tmp_path):
  patch = """
    import os as real, types
    from jaxscale.jobs.preflight import disk
    class Room:
      f_bavail, f_frsize, f_files, f_favail = 50_000, 4096, 10**6, 500
    fake = types.SimpleNamespace(**vars(real))
    fake.statvfs = lambda path: Room
    if rank == 1: disk.os = fake
  """
  findings = preflight(HOSTS[:2], only("disk"), f"--workdir={tmp_path}", patch=patch)
  assert wrong(findings) == [
    f"workdir {tmp_path}: 204.8 MB free, 268.4 MB needed",
    f"workdir {tmp_path}: only 500 more files are allowed",
  ]
  assert findings[-1].ok and "268 MB" not in findings[-1].text
  assert "written and synced at" in findings[-1].text
