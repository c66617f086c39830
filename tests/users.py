"""Being another user without losing sight of what only root may read.

Root passes every permission check, so what happens to somebody else has to be tried as somebody else. But the
interpreters, the models and pytest's directories may lie where only root gets to, in its home for one. Linux has a
right between the two: with ``CAP_DAC_READ_SEARCH`` a user reads every file and passes every directory, and is refused
each write that its uid is not allowed. Where the tests do not run as root they are an ordinary user already, and stay
it.

As a program: ``python users.py UID COMMAND...`` becomes the user and then the command.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NOBODY = 65534
SOMEBODY_ELSE = 65533

_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522


def become(user: int) -> None:
    """Make this process, and all it starts, a user that reads everything and writes only what it may.

    Args:
        user: Number of the user and of its only group. Ignored where this process is not root.

    Raises:
        OSError: The kernel refuses.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    os.setgroups([])
    check(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    right = 1 << _CAP_DAC_READ_SEARCH
    # Twice effective, permitted, inheritable: capabilities 0 to 31, then 32 to 63.
    check(libc.capset(header, (ctypes.c_uint32 * 6)(right, right, right, 0, 0, 0)))
    # Without this the right would end with the next exec.
    check(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0))


def program_as(user: int, program: str, folder: Path) -> str:
    """Return a program in `folder` that runs `program` with its arguments as a user."""
    path = folder / f"as-{user}"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{__file__}" {user} "{program}" "$@"\n')
    path.chmod(0o755)
    return str(path)


if __name__ == "__main__":
    become(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
