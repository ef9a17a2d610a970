"""Run a command as another user, from root.

python tests/support/become.py UID GROUP,GROUP COMMAND [WORD ...]
"""

import ctypes
import os
import sys

_SEARCH = 2  # CAP_DAC_READ_SEARCH
_KEEPCAPS, _AMBIENT, _RAISE = 8, 47, 2  # of prctl(2)
_VERSION = 0x20080522  # of capset(2)


def become(uid: int, groups: tuple[int, ...] = ()) -> None:
  """Give up root for a user, with a group of the same number; for a child process.

  The right to search all directories stays, as Python and its packages may be in one that only
  root can open. The right to write, and owners of new files, are the user's.
  """
  libc = ctypes.CDLL(None, use_errno=True)
  os.setgroups(groups)
  os.setresgid(uid, uid, uid)
  libc.prctl(_KEEPCAPS, 1, 0, 0, 0)
  os.setresuid(uid, uid, uid)
  bits = 1 << _SEARCH
  head, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)(bits, bits, bits, 0, 0, 0)
  libc.capset(head, sets)
  libc.prctl(_AMBIENT, _RAISE, _SEARCH, 0, 0)


if __name__ == "__main__":
  become(int(sys.argv[1]), tuple(map(int, filter(None, sys.argv[2].split(",")))))
  os.execvp(sys.argv[3], sys.argv[3:])
