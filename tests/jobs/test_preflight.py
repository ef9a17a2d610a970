"""The preflight between real processes, with what it is there to find."""

from support.preflight_process import HOSTS, answers, only, preflight, start, wrong


def test_a_good_allocation_is_ready_without_jax_within_seconds(tmp_path):
  processes = start(HOSTS, [f"--workdir={tmp_path / 'runs'}", "--skip=devices,disk"])
  reported = answers(processes)
  findings, seconds, imports_jax = reported[0]
  assert len(reported) == 4 and not wrong(findings) and not imports_jax
  assert seconds < 60  # 1.7 s on two busy cores
  text = "\n".join(f.text for f in findings)
  assert "versions in all processes: python 3." in text and "jax 0." in text
  assert "all 4 hosts see each other's files" in text
  assert list((tmp_path / "runs").iterdir()) == []  # nothing is left behind


def test_another_version_on_one_rank_is_named():
  patch = """
    from jaxscale.jobs.preflight import software
    real = software.handshake.versions(software.PACKAGES)
    if rank == 2: software.handshake.versions = lambda _: real | {"jaxlib": "0.9.0"}
    if rank == 1: software.handshake.versions = lambda _: real | {"libtpu": "0.0.3"}
  """
  reported = wrong(preflight(HOSTS, only("software"), patch=patch))
  assert any(x.startswith("jaxlib 0.9.0 on process 2 (n3), 0.") for x in reported)
  assert "libtpu 0.0.3 on process 1 (n2), none on the others" in reported
  assert len(reported) == 2


def test_a_process_that_dies_ends_the_others_with_its_name():
  patch = """
    import os
    from jaxscale.jobs.preflight import shared_files
    if rank == 2: shared_files._see = lambda *a: os._exit(9)
  """
  reported = answers(start(HOSTS, [only("files")], patch))
  texts = [findings[0].text for findings, *_ in reported]
  assert len(reported) == 3
  assert "process 2 (n3) was lost at 'files" in texts[0]
  assert all("process 0 (n1) exited at 'files" in text for text in texts[1:])
