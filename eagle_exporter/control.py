"""The control file: how a command reaches the hooks of a running server.

``control`` in the server's directory is a small text file, one command a line (``#`` begins a comment), writable only
by the server's owner. Hooks read it with ``pread`` once per cycle and never map it; the commands of
``eagle-exporter off``, ``on`` and ``profile`` write it in place.
"""

from __future__ import annotations

import os
import stat
import time
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
        """Return the commands when they differ from the last call's, else None. One ``pread``."""
        data = os.pread(self._descriptor, MAX_BYTES, 0)
        if data == self._last:
            return None
        self._last = data
        lines = (line.strip() for line in data.decode("ascii", "replace").splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def write(directory: Path, commands: list[str]) -> None:
    """Replace the commands of a server, in place: the hooks hold the file open.

    Raises:
        OSError: No such server, or no permission.
        ValueError: Too long.
    """
    # The same command again is a new command (a blown fuse is reset by a second "on"): the time makes it differ.
    data = "".join(f"{command}\n" for command in (*commands, f"# {time.time_ns()}")).encode("ascii")
    if len(data) > MAX_BYTES:
        raise ValueError(f"commands are longer than {MAX_BYTES} bytes")
    descriptor = os.open(directory / CONTROL_FILE, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # One write padded with newlines, so that a reader never sees half of the old commands behind the new.
        os.pwrite(descriptor, data.ljust(MAX_BYTES, b"\n"), 0)
        os.ftruncate(descriptor, MAX_BYTES)
    finally:
        os.close(descriptor)
