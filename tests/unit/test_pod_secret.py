"""The secret of processes that only JAX has connected: from a private file, or a line says so."""

import itertools
import os
import stat
import threading

import pytest

from jaxscale.cluster import Timeouts, host_collectives, pod_secret, secret, session
from jaxscale.cluster.group import PeerError
from jaxscale.cluster.launch import Launch
from jaxscale.errors import ConfigError
from support.two_users import needs_root

COUNT = 3


@pytest.fixture
def agree(tmp_path):
  """Return a function that agrees on a secret in threads, by rank: secrets or errors, and calls."""

  def run(workdirs=(tmp_path,) * COUNT, envs=({},) * COUNT):
    calls, results = [[None] * COUNT], [None] * COUNT
    barrier = threading.Barrier(COUNT, action=lambda: calls.append([None] * COUNT))

    def process(rank):
      def gather(value):
        calls[-1][rank] = value
        barrier.wait(60)
        return calls[-2]

      try:
        results[rank] = pod_secret.agree(workdirs[rank], rank, gather, envs[rank])
      except ConfigError as e:
        results[rank] = e

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(COUNT)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(100)
    return results, calls[:-1]

  return run


def test_the_file_is_private_and_is_gone_when_all_have_read_it(agree, tmp_path, monkeypatch):
  modes, read = [], secret.read_file

  def read_file(path):
    modes.append(stat.S_IMODE(path.stat().st_mode))
    return read(path)

  monkeypatch.setattr(pod_secret, "read_file", read_file)
  umask = os.umask(0)
  try:
    results, calls = agree((tmp_path / "runs" / "a",) * COUNT)
  finally:
    os.umask(umask)
  assert len({*results}) == 1 and len(results[0]) == 32 and modes == [0o600] * (COUNT + 1)
  assert not any(tmp_path.glob("runs/a/.*")) and results[0].hex() not in str(calls)
  assert agree()[0] != results  # a new one for each start


def test_the_variable_counts_and_must_be_set_everywhere(agree):
  env = {"JAXSCALE_SECRET": "x" * 40}
  results, calls = agree(envs=(env,) * COUNT)
  assert results == [secret.find_secret(env)] * COUNT and len(calls) == 1
  results, _ = agree(envs=(env, {}, env))
  assert {str(e) for e in results} == {
    "JAXSCALE_SECRET: not set in process 1; set JAXSCALE_SECRET to the same 64 random hex "
    "digits in all processes"
  }


def test_a_workdir_that_is_not_shared_is_one_warning(agree, tmp_path, capfd):
  results, calls = agree((tmp_path / "a", tmp_path / "a", tmp_path / "b"))
  assert len({*results}) == 1 and results[0].hex() == calls[-1][0]
  (line,) = capfd.readouterr().err.splitlines()
  assert "because process 2 cannot read it from a file (" in line
  assert line.startswith("warning: other users may know the run's secret") and "No such" in line


def test_a_workdir_that_cannot_be_written_is_one_warning(agree, tmp_path, capfd):
  (tmp_path / "file").write_text("")
  results, _ = agree((tmp_path / "file" / "a",) * COUNT)
  assert len({*results}) == 1
  assert "because process 0 cannot read it from a file (" in capfd.readouterr().err


REPLACED = {
  "a link": lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
  "removed": lambda path: path.unlink(),
  "readable": lambda path: path.chmod(0o644),
  "damaged": lambda path: path.write_text("0" * 63),
  "another user's": lambda path: os.chown(path, 65534, 65534),
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_file_that_another_user_has_replaced_is_never_believed(agree, monkeypatch, how):
  if how == "another user's":
    needs_root()
  create = pod_secret._create

  def replaced(workdir):
    path, problem = create(workdir)
    REPLACED[how](path)
    return path, problem

  monkeypatch.setattr(pod_secret, "_create", replaced)
  results, calls = agree()
  assert all(isinstance(e, ConfigError) for e in results) and len({str(e) for e in results}) == 1
  assert (
    ".secret-" in str(results[0])
    and "; " in str(results[0])
    and not any(isinstance(v, str) for v in calls[-1])
  )


def test_a_forged_name_makes_process_0_remove_nothing(agree, tmp_path, monkeypatch):
  (tmp_path / "kept").write_text("0" * 64)

  def forging(gather):
    turns = itertools.count()

    def forged(value):
      values = gather(value)
      return [["../kept", ""], *values[1:]] if next(turns) == 1 else values

    return forged

  real = pod_secret.agree
  monkeypatch.setattr(
    pod_secret,
    "agree",
    lambda workdir, rank, gather, env: real(workdir / "a", rank, forging(gather), env),
  )
  results, _ = agree()
  assert (tmp_path / "kept").exists() and not any((tmp_path / "a").iterdir())
  assert len({*results}) == 1 and results[0] != bytes(32)


FORGED = [[5], [None], [["job"]], [["job", 5]], [{"job": 1, "host": 2}], [[]]]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
def test_a_forged_value_of_any_shape_is_one_line(tmp_path, monkeypatch, place, forged):
  turns = itertools.count()

  def gather_openly(value):
    return forged if next(turns) == place else [value, value]

  monkeypatch.delenv("JAXSCALE_SECRET")
  monkeypatch.setattr(session.join, "join", lambda *args: None)
  monkeypatch.setattr(session, "_jax_is_initialized", False)
  monkeypatch.setattr(host_collectives, "gather_openly", gather_openly)
  try:
    launch, own = session._join_by_jax(Launch("tpu", 0, 0), Timeouts(), tmp_path)
  except (ConfigError, PeerError) as e:
    assert "\n" not in str(e)
  else:
    assert len(own) == 32 and isinstance(launch.host, str) and isinstance(launch.job, str)
  assert not any(tmp_path.iterdir())
