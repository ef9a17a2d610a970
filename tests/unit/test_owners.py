"""Rule of who may write to a file, and what works in usual layouts of shared file systems."""

import grp
import os
import pwd
from pathlib import Path

import pytest

from jaxscale import owners
from jaxscale.cli.train import default_workdir
from jaxscale.config.record import unsafe_code
from jaxscale.owners import own_folder, unsafe_owner
from jaxscale.run import trace_request
from support.two_users import ATTACKER, VICTIM, give_away


def raised(error):
  """Return a function that raises an error."""

  def function(*_, **__):
    raise error

  return function


def test_unsafe_owner(tmp_path, umask, monkeypatch, shared_groups):
  path = tmp_path / "own" / "a"
  path.parent.mkdir(mode=0o755)
  path.write_text("")
  assert unsafe_owner(path) is None

  def others(file, folder, *, group):
    path.chmod(file)
    path.parent.chmod(folder)
    return unsafe_owner(path, group=group)

  for group, modes in ((True, (0o664, 0o775)), (False, (0o666, 0o777))):
    for file, folder in ((modes[0], 0o755), (0o644, modes[1])):
      assert "other users can write" in (others(file, folder, group=group) or "")
  assert others(0o644, 0o755, group=True) is others(0o664, 0o775, group=False) is None
  assert others(0o644, 0o1777, group=False) is None  # as /tmp is
  (tmp_path / "link").symlink_to(path)
  assert "not a file" in (unsafe_owner(tmp_path / "link") or "")
  path.parent.chmod(0o755)
  assert unsafe_owner(path.parent, is_folder=True) is None
  assert "not a folder" in (unsafe_owner(path, is_folder=True) or "")
  path.parent.chmod(0o775)
  assert "other users can write" in (unsafe_owner(path.parent, is_folder=True) or "")
  give_away(path, monkeypatch)
  assert "another user" in (others(0o644, 0o755, group=True) or "")
  if os.geteuid() == 0:  # Else the folders above are also the other user's.
    assert others(0o644, 0o775, group=False) is None  # a colleague's
  assert "another user" in (others(0o644, 0o1777, group=False) or "")


@pytest.fixture
def deep(tmp_path, umask):
  """Return a file in nested folders of this user."""
  path = tmp_path / "a" / "b" / "file"
  path.parent.mkdir(parents=True)
  path.write_text("")
  return path


def test_every_folder_on_the_way_counts(deep, shared_groups):
  """A look at two of them missed the rename of a folder further up."""
  assert unsafe_owner(deep) is None
  above = deep.parents[1]
  for mode, is_open in ((0o775, True), (0o777, True), (0o1775, False), (0o1777, False)):
    above.chmod(mode)
    assert (unsafe_owner(deep) == f"other users can write to {above}") is is_open
  above.chmod(0o775)
  assert unsafe_owner(deep, group=False) is None  # a project's folder
  above.chmod(0o777)
  assert unsafe_owner(deep, group=False) == f"other users can write to {above}"


def test_links_on_the_way_are_followed_like_the_kernel_does(deep, tmp_path, shared_groups):
  (tmp_path / "open").mkdir()
  (tmp_path / "first").symlink_to("open/second")
  (tmp_path / "open" / "second").symlink_to(tmp_path / "a")
  path = tmp_path / "a" / ".." / "first" / "b" / "file"
  assert path.is_file() and unsafe_owner(path) is None
  (tmp_path / "open").chmod(0o777)
  assert unsafe_owner(path) == f"other users can write to {tmp_path}/open"
  assert unsafe_owner(deep) is None
  (tmp_path / "circle").symlink_to("circle")
  with pytest.raises(OSError, match="symbolic links"):
    unsafe_owner(tmp_path / "circle" / "file")


def test_a_group_of_one_user_is_no_other_user(deep, monkeypatch):
  """The umask of 002 is usual where each user has a group of that name."""
  deep.parent.chmod(0o775)
  user = pwd.getpwuid(os.geteuid())
  if os.geteuid() == 0:
    os.chown(deep.parent, -1, user.pw_gid)
  monkeypatch.setattr(os, "getxattr", raised(OSError), raising=False)

  def groups(name, members, primary=True):
    owners._is_private.cache_clear()
    group = deep.parent.stat().st_gid
    entry = grp.struct_group((name, "x", group, members))
    monkeypatch.setattr(grp, "getgrgid", lambda number: entry)
    known = pwd.struct_passwd((*user[:3], group + (not primary), *user[4:]))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: known)
    return unsafe_owner(deep)

  open_ = f"other users can write to {deep.parent}"
  name = user.pw_name
  assert groups(name, []) is groups(name, [name]) is None
  assert groups(name, [name, "mallory"]) == groups("project", []) == open_
  assert groups(name, [], primary=False) == open_
  assert groups(name, []) is None
  monkeypatch.setattr(os, "getxattr", lambda *_, **__: b"an access list", raising=False)
  assert unsafe_owner(deep) == open_
  owners._is_private.cache_clear()


def test_root_of_the_host_is_root_in_a_container_without_root(deep, monkeypatch):
  """There all users of the host are shown as nobody, who owns / and /home."""
  folder, me = deep.parents[1], os.geteuid()
  stat_of = Path.lstat

  def lstat(path):
    info = [*stat_of(path)]
    info[4] = 65534 if path in shown else me
    return os.stat_result(info)

  monkeypatch.setattr(Path, "lstat", lstat)
  for uid_map, number, is_trusted in (
    ("0 0 4294967295", "65534\n", False),
    ("1001 1001 1", "65534\n", True),
    ("1001 1001 1", "", True),
  ):
    texts = {"/proc/self/uid_map": uid_map, "/proc/sys/kernel/overflowuid": number}
    monkeypatch.setattr(owners, "readable_text", lambda path, texts=texts: texts[str(path)])
    owners._host_user.cache_clear()
    shown = [folder]
    assert (unsafe_owner(deep) is None) is is_trusted
    shown = [deep]  # What is executed must be one's own.
    assert "another user" in (unsafe_owner(deep) or "")
  owners._host_user.cache_clear()


def test_a_whole_path_needs_no_current_folder(deep, monkeypatch):
  """It may be deleted while a run lives."""
  monkeypatch.setattr(Path, "cwd", raised(FileNotFoundError()))
  assert unsafe_owner(deep) is None


def test_a_folder_by_its_descriptor_stays_the_same(tmp_path, umask, shared_groups):
  folder = tmp_path / "kept"
  folder.mkdir(mode=0o700)
  (folder / "mine").write_text("mine")
  tmp_path.chmod(0o777)
  with own_folder(folder) as opened:
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    (folder / "mine").write_text("another's")
    assert (opened / "mine").read_text() == "mine"
  with (
    pytest.raises(OSError, match=f"other users can write to {tmp_path}"),
    own_folder(folder, by_descriptor=False),
  ):
    pass
  for change, problem in (
    (lambda: folder.chmod(0o770), f"other users can write to {folder}"),
    (lambda: (folder.rename(tmp_path / "x"), folder.symlink_to("x")), "Not a directory"),
    (lambda: (folder.unlink(), folder.touch()), "Not a directory"),
  ):
    change()
    with pytest.raises(OSError, match=problem), own_folder(folder):
      pass


PROJECT = 2000  # a group of both users

# Folders from the root on as (owner, group, mode), the last one being the run's; and whether
# programs are loaded from it on CPUs and TPUs, and on GPUs, whether its own code is executed
# without --trust, and whether its caches of tokens and requests for traces are used.
ROOT, MINE, THEIRS = (0, 0, 0o755), (VICTIM, VICTIM, 0o755), (ATTACKER, ATTACKER, 0o755)
LAYOUTS = {
  "home": ([ROOT, (VICTIM, VICTIM, 0o700), MINE], "cpu gpu code data"),
  "home, readable by all": ([ROOT, MINE, MINE], "cpu gpu code data"),
  "home, umask 002, own group": (
    [ROOT, (VICTIM, VICTIM, 0o775), (VICTIM, VICTIM, 0o775)],
    "cpu gpu code data",
  ),
  "project 2775": ([(0, PROJECT, 0o2775), (VICTIM, PROJECT, 0o2755)], "cpu data"),
  "project 2775, umask 002": ([(0, PROJECT, 0o2775), (VICTIM, PROJECT, 0o2775)], "cpu data"),
  "project 3775, sticky": ([(0, PROJECT, 0o3775), (VICTIM, PROJECT, 0o2755)], "cpu gpu code data"),
  "project 3775, umask 002": ([(0, PROJECT, 0o3775), (VICTIM, PROJECT, 0o2775)], "cpu data"),
  "folder of another user, as in a container of root": ([THEIRS, MINE], "cpu data"),
  "project 3775 of a colleague": ([(ATTACKER, PROJECT, 0o3775), MINE], "cpu data"),
  "volume of Kubernetes, 2775": ([(0, 4321, 0o2775), MINE], "cpu data"),
  "scratch 1777": ([(0, 0, 0o1777), MINE, MINE], "cpu gpu code data"),
  "scratch 0777, not sticky": ([(0, 0, 0o777), MINE, MINE], "cpu"),
  "run open to all": ([ROOT, MINE, (VICTIM, VICTIM, 0o777)], "cpu"),
  "run of a colleague": ([ROOT, THEIRS, THEIRS], "data"),
  "run of a colleague in scratch 1777": ([(0, 0, 0o1777), THEIRS], "data"),
}


@pytest.fixture
def as_victim(users, monkeypatch):
  """Decide as the victim would, in this process."""
  monkeypatch.setattr(os, "geteuid", lambda: VICTIM)
  monkeypatch.setattr(owners, "_is_private", lambda group: group == VICTIM)
  return users


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_works_in_a_layout(name, as_victim):
  steps, works = LAYOUTS[name]
  run = as_victim.folder
  for number, (uid, gid, mode) in enumerate(steps):
    run = run / f"{number}"
    as_victim.make(str(run.relative_to(as_victim.folder)), uid, mode, gid)
  owner = steps[-1][0]
  for file in ("config.json", "code/own.py", "compiled/x", "profile/request.json", "cache/a.bin"):
    path = run / file
    if path.parent != run:
      path.parent.mkdir(mode=0o700 if file == "compiled/x" else 0o755)
    path.touch(0o644)
    for entry in (path, *[path.parent] * (path.parent != run)):
      os.chown(entry, owner, owner)

  def programs(device):
    with own_folder(run / "compiled", by_descriptor=device == "cpu"):
      return None

  problems = {}
  for device in ("cpu", "gpu"):
    try:
      problems[device] = programs(device)
    except OSError as e:
      problems[device] = e.strerror
  problems["code"] = unsafe_code(run)
  caches = [unsafe_owner(run / p, group=False) for p in ("cache/a.bin", "profile/request.json")]
  assert caches[0] == caches[1] or (caches[0] is None) is (caches[1] is None)
  problems["data"] = caches[0]
  assert [k for k, problem in problems.items() if problem is None] == works.split(), problems
  if table := os.environ.get("LAYOUTS_TABLE"):
    cells = [name, *(problems[k] or "yes" for k in ("cpu", "gpu", "code", "data"))]
    row = " | ".join(cells).replace(str(as_victim.folder), "").replace("/0", "/A")
    with Path(table).open("a") as file:
      file.write(f"| {row} |\n")


def test_the_settings_of_a_colleague_train_in_the_current_folder(as_victim, tmp_path):
  """A link that he made beside his run would have led the victim's files anywhere."""
  run = as_victim.make("attacker/run", ATTACKER)
  (run / "config.json").write_text("{}")
  assert default_workdir(f"{run}/config.json") == "runs/run-again"
  os.symlink(as_victim.victim, as_victim.attacker / "link")
  (as_victim.victim / "config.json").write_text("{}")
  as_victim.give(as_victim.attacker, ATTACKER)
  assert default_workdir(str(as_victim.attacker / "link")) == "runs/victim-again"
  assert default_workdir(str(as_victim.victim)) == f"{as_victim.victim}-again"


@pytest.mark.parametrize("mode, is_read", [(0o755, True), (0o2775, True), (0o777, False)])
def test_only_colleagues_request_a_trace(as_victim, mode, is_read):
  """Anybody could make profile/ in a workdir that is open to all."""
  workdir = as_victim.make("victim/run", VICTIM, mode, PROJECT)
  as_victim.make("victim/run/profile", ATTACKER)
  request = trace_request.make(3, (0,), wait_s=600)
  trace_request.write_json(workdir / "profile" / "request.json", request._asdict())
  as_victim.give(workdir / "profile", ATTACKER)
  assert trace_request.read(workdir) == (request if is_read else None)
