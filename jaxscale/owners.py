"""Rule of who may write to what is executed, loaded or trusted.

Everything that could run code in this process, such as compiled programs and a run's own classes,
is used only where nobody else can replace it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxscale.files import readable_text, whole_number

_LONGEST_WAY = 1000  # folders and links, as links can lead in a circle


def unsafe_owner(path: Path, *, group: bool = True, is_folder: bool = False) -> str | None:
  """Describe which other user can replace or change a file; None if none can.

  The rule is that of OpenSSH's StrictModes. The file, and every folder and link on the way to
  it, must belong to this user or root, and nobody else may write to them. A folder with the
  sticky bit, such as /tmp, may be open to others, who cannot replace what is not theirs in it.
  Nobody else can then rename or replace anything between this check and a later use.

  Args:
    path: path of the file. It must not be a link; folders on the way to it may be.
    group: whether colleagues count as others. False accepts files of other users, and folders
      that their groups can write to, unless everybody could have put them there.
    is_folder: the path is a folder, to which nobody else may write.

  Raises:
    OSError: the path is missing.

  Example:
    >>> unsafe_owner(Path("/"), is_folder=True)
  """
  *_, (_, last) = way = _way_to(path)
  if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(last.st_mode):
    return f"{path} is not a {'folder' if is_folder else 'file'}"
  problems = (_problem(entry, info, group, info is not last) for entry, info in reversed(way))
  return next(filter(None, problems), None)


def _way_to(path: Path) -> list[tuple[Path, os.stat_result]]:
  """Return the folders and links on the way to a path, from the root, and what is there."""
  # The current folder, which may be deleted, matters to relative paths only.
  at, names, way = Path(), [*(path if path.is_absolute() else Path.cwd() / path).parts], []
  while names:
    if (name := names.pop(0)) == "..":
      at = at.parent
      continue
    entry = at / name  # Joined to "/", the first part of an absolute link begins anew.
    way.append((entry, entry.lstat()))
    if names and stat.S_ISLNK(way[-1][1].st_mode):
      if len(way) > _LONGEST_WAY:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
      names = [*Path(os.readlink(entry)).parts, *names]
    else:
      at = entry
  return way


def _problem(path: Path, info: os.stat_result, group: bool, is_passed: bool) -> str | None:
  """Describe which other user can change one entry; `is_passed`: on the way to another."""
  is_mine = info.st_uid in (os.geteuid(), 0)
  if not group:  # A colleague's folder in /scratch can only be his, as others cannot replace it.
    parent = path.parent.stat().st_mode
    is_mine |= not parent & stat.S_IWOTH or bool(is_passed and parent & stat.S_ISVTX)
  if not is_mine and not (is_passed and info.st_uid == _host_user()):
    return f"{path} belongs to another user ({user_name(info.st_uid)})"
  is_kept = stat.S_ISLNK(info.st_mode) or (is_passed and info.st_mode & stat.S_ISVTX)
  if not is_kept and _others_write(path, info, group):
    return f"other users can write to {path}"
  return None


def _others_write(path: Path, info: os.stat_result, group: bool) -> bool:
  if not (group and info.st_mode & stat.S_IWGRP):
    return bool(info.st_mode & stat.S_IWOTH)
  with contextlib.suppress(OSError, AttributeError):  # no list, or no such lists on this system
    os.getxattr(path, "system.posix_acl_access")
    return True  # An access list's other users may write if the group's bit is set.
  return bool(info.st_mode & stat.S_IWOTH) or not _is_private(info.st_gid)


@functools.cache
def _is_private(group: int) -> bool:
  """Return whether a group is that of this user or root alone, as usual with a umask of 002.

  Such a group has the name of its user, whose primary group it is, and no other members. Primary
  groups of other users are not searched, because a directory service may have thousands.
  """
  with contextlib.suppress(KeyError):
    entry = grp.getgrgid(group)
    for user in map(pwd.getpwuid, (os.geteuid(), 0)):
      name = user.pw_name
      if user.pw_gid == group and entry.gr_name == name and {name}.issuperset(entry.gr_mem):
        return True
  return False


@functools.cache
def _host_user() -> int | None:
  """Return the user that stands for root of the host in a container without root; else None.

  In such a user namespace, all users without a number of their own in it are shown as one, and
  folders such as / and /home belong to it.
  """
  words = readable_text(Path("/proc/self/uid_map")).split()
  if words in ([], ["0", "0", "4294967295"]):
    return None
  number = whole_number(readable_text(Path("/proc/sys/kernel/overflowuid")).strip())
  return 65534 if number is None else number


def user_name(number: int) -> str:
  """Return the name of a user, if there is one, and the number, for messages.

  Example:
    >>> user_name(0), user_name(4_000_000_000)
    ('root, uid 0', 'uid 4000000000')
  """
  with contextlib.suppress(KeyError):
    return f"{pwd.getpwuid(number).pw_name}, uid {number}"
  return f"uid {number}"


@contextlib.contextmanager
def own_folder(path: Path, *, by_descriptor: bool = True) -> Iterator[Path]:
  """Yield a path of this user's folder that others cannot exchange for another folder.

  Args:
    path: the folder, which is not a link.
    by_descriptor: whether the path that is yielded may be that of a descriptor, so that others
      may write to the parents, as in the folder of a project. Only Linux has such paths. False
      refuses these parents, by the rule of `unsafe_owner`.

  Raises:
    OSError: the path is missing or not a folder, or others can write to it.
  """
  number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
  try:
    if by_descriptor and (opened := Path(f"/proc/self/fd/{number}")).is_dir():
      problem = _problem(opened, os.fstat(number), True, False)
    else:
      problem, opened = unsafe_owner(path, is_folder=True), path
    if problem:
      raise OSError(None, problem.replace(str(opened), str(path)))
    yield opened
  finally:
    os.close(number)
