"""The control file: how a command reaches the hooks of a running server.

``control`` in the server's directory is a small text file, one command a line (``#`` begins a comment), writable only
by the server's owner. Hooks read it with ``pread`` a few times a second and never map it; the commands of
``eagle-exporter off``, ``on`` and ``profile`` write it in place.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle_exporter.registry.layout import CONTROL_FILE

MAX_BYTES = 256


class Control:
    """The hooks' end: looks whether the commands have changed."""

    def __init__(self, directory: Path) -> None:
        """Open the control file of `directory`, creating an empty one.

        Raises:
            OSError: It cannot be created.
        """
        # O_NONBLOCK: opening a FIFO put in its place would wait for a writer.
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(directory / CONTROL_FILE, flags, 0o640)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise OSError(f"{directory / CONTROL_FILE} is not a regular file")
        self._last = b""

    def changed(self) -> list[str] | None:
        """Return the commands that were not there at the last call, None when nothing has changed. One ``pread``."""
        data = os.pread(self._descriptor, MAX_BYTES, 0)
        if data == self._last:
            return None
        before = set(_lines(self._last))
        self._last = data
        # A line carries the time at which it was written, so a command that was given again is a new line.
        return [command for line in _lines(data) if line not in before and (command := _command(line))]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def write(directory: Path, commands: list[str]) -> None:
    """Replace the commands of a server, in place: the hooks hold the file open.

    Raises:
        OSError: No such server, or no permission.
        ValueError: Too long.
    """
    change(directory, lambda _: commands)


def change(
    directory: Path,
    decide: Callable[[list[str]], Sequence[str]],
    *,
    wait: bool = True,
    drop: Sequence[str] | None = None,
) -> None:
    """Add commands in a way that two who do it at once do not lose each other's.

    Args:
        directory: The server's.
        decide: Gets the commands that are there and returns the new ones; what it raises passes through, and the file
            stays as it is.
        wait: Wait while somebody else changes the file; hooks do not.
        drop: First words of commands that do not stay; None drops every one.

    Raises:
        OSError: No such server, or no permission; `BlockingIOError` when it is being changed and `wait` is False.
        ValueError: Too long.
    """
    descriptor = os.open(directory / CONTROL_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        lines = _lines(os.pread(descriptor, MAX_BYTES, 0))
        added = decide([command for line in lines if (command := _command(line))])
        kept = [line for line in lines if drop is not None and _command(line) and _command(line).split()[0] not in drop]
        # The same command again is a new command (a blown fuse is reset by a second "on"): the time makes it differ.
        stamp = f" # {time.time_ns()}"
        data = "".join(f"{line}\n" for line in (*kept, *(command + stamp for command in added))).encode("ascii")
        if len(data) > MAX_BYTES:
            raise ValueError(f"commands are longer than {MAX_BYTES} bytes")
        # One write padded with newlines, so that a reader never sees half of the old commands behind the new.
        os.pwrite(descriptor, data.ljust(MAX_BYTES, b"\n"), 0)
        os.ftruncate(descriptor, MAX_BYTES)
    finally:
        os.close(descriptor)


def _lines(data: bytes) -> list[str]:
    lines = (line.strip() for line in data.decode("ascii", "replace").splitlines())
    return [line for line in lines if line]


def _command(line: str) -> str:
    """Return a line without its comment."""
    return line.partition("#")[0].strip()
