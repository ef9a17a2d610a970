"""Two users of one machine, by uid: the victim runs our commands, the attacker writes files.

Only root can act as both, so tests that use `users` skip without it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.commands import child_env

VICTIM, ATTACKER = 1001, 1002
_BECOME = Path(__file__).with_name("become.py")


def needs_root() -> None:
  """Skip a test whose files or processes belong to another user."""
  if os.geteuid():
    pytest.skip("only root can act as another user")


class Users:
  """Folder of both users, and what each of them does.

  Attributes:
    folder: a folder of root, mode 0755; `victim` and `attacker` in it are theirs, mode 0755.
  """

  def __init__(self, folder: Path):
    self.folder = folder
    self.victim, self.attacker = (self.make(name, uid) for name, uid in _NAMES.items())

  def make(self, name: str, uid: int, mode: int = 0o755, gid: int | None = None) -> Path:
    """Create a folder of a user, whatever the umask."""
    path = self.folder / name
    path.mkdir(parents=True)
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path

  def env(self, uid: int, **variables: str) -> dict[str, str]:
    """Return the environment of a user, whose home is the folder."""
    home = self.victim if uid == VICTIM else self.attacker
    # Without the tests' settings of JAX's cache: a fast machine kept no program of 0.01 s.
    dropped = "XDG_", "JAX_COMPILATION", "JAX_PERSISTENT"
    env = {k: v for k, v in child_env().items() if not k.startswith(dropped)}
    return env | {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"} | variables

  def popen(
    self, uid: int, *command, groups=(), cwd=None, stdin=subprocess.DEVNULL, **variables: str
  ):
    """Start a command as a user, with its output in pipes."""
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=stdin, text=True)
    # Not as `preexec_fn`, which forks, and JAX warns of forks.
    words = [sys.executable, "-I", _BECOME, uid, ",".join(map(str, groups)), *command]
    env = self.env(uid, **variables)
    return subprocess.Popen([*map(str, words)], cwd=cwd or self.folder, env=env, **options)

  def run(self, uid: int, *command, timeout=120, **options) -> subprocess.CompletedProcess[str]:
    """Run a command as a user to its end; `options` are those of `popen`."""
    with self.popen(uid, *command, **options) as process:
      try:
        out, err = process.communicate(timeout=timeout)
      finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)

  def jaxscale(self, *words, uid=VICTIM, **options) -> subprocess.CompletedProcess[str]:
    """Run a command of ours as the victim."""
    return self.run(uid, sys.executable, "-P", "-m", "jaxscale", *words, **options)

  def give(self, path: Path, uid: int) -> Path:
    """Make a user the owner of a file or folder and all that is in it."""
    for entry in (path, *path.rglob("*")):
      os.chown(entry, uid, uid, follow_symlinks=False)
    return path


_NAMES = {"victim": VICTIM, "attacker": ATTACKER}


@pytest.fixture
def users():
  """Yield `Users`; their folder is outside of pytest's, which only root can enter."""
  needs_root()
  folder = Path(tempfile.mkdtemp(prefix="jaxscale-users-")).resolve()
  folder.chmod(0o755)
  try:
    yield Users(folder)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Make a file, and without root all others, another user's in this process."""
  if os.geteuid() == 0:
    os.chown(path, 12345, -1, follow_symlinks=False)
  else:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
