"""The hot path of the registry: one rank's counters, in shared memory.

Values live in a private array and are copied into the file once per `RankWriter.commit`; the copy takes well under
a microsecond. Nothing here is imported from outside the standard library, starts a thread or takes a contended
lock.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import platform
import shutil
import struct
import threading
import time
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any

from eagle_exporter.registry import layout as fmt
from eagle_exporter.registry.layout import Layout


class RegistryError(Exception):
    """The registry cannot be used; the message names the path and the remedy."""


def server_directory(root: Path, server: str, *, group: str | None = None) -> Path:
    """Create (if needed) and return the directory of a server.

    The directory is setgid with mode 2750, so that an exporter in the same group reads it and nobody else does.

    Args:
        root: The registry root; created with mode 2755 when missing.
        server: The server's name.
        group: Group that may read, by name or number; the process's own group when None.

    Raises:
        RegistryError: The root is no directory, the directory cannot be created or handed to the group, or one that is
            there is not for this user (`problem_of`).
    """
    path = root / fmt.directory_name(server)
    try:
        if not root.is_dir():
            root.mkdir(mode=0o755, parents=True, exist_ok=True)
            _give_to_group(root, group, 0o2755)
        if not path.is_dir():
            path.mkdir(mode=0o750, exist_ok=True)
            _give_to_group(path, group, 0o2750)
    except FileExistsError as error:
        wrong = path if root.is_dir() else root
        raise RegistryError(f"{wrong} is not a directory; set EAGLE_EXPORTER_DIR to one") from error
    except OSError as error:
        raise RegistryError(_cannot_create(path, error.strerror)) from error
    problem = _problem_of_directory(path)
    if problem:
        raise RegistryError(problem)
    return path


def problem_of(root: Path, server: str) -> str:
    """Return why a server of this user could not use its directory, "" when it could. Nothing is created.

    Args:
        root: The registry root, there or not.
        server: The server's name.
    """
    path = root / fmt.directory_name(server)
    if os.path.lexists(path):
        return _problem_of_directory(path)
    existing = next(folder for folder in path.parents if os.path.lexists(folder))
    if not os.path.isdir(existing):
        return f"{existing} is not a directory; set EAGLE_EXPORTER_DIR to one"
    why = _why_not_writable(existing)
    return _cannot_create(path, why) if why else ""


def _cannot_create(path: Path, why: str | None) -> str:
    return f"cannot create the registry directory {path}: {why}; set EAGLE_EXPORTER_DIR to a writable directory"


def _problem_of_directory(path: Path) -> str:
    remedy = "set EAGLE_EXPORTER_DIR to a directory of this user, or EAGLE_EXPORTER_SERVER to another name"
    if not os.path.isdir(path):
        return f"{path} is not a directory; set EAGLE_EXPORTER_DIR to one"
    why = _why_not_writable(path)
    if why:
        return f"cannot write into {path}, which belongs to uid {path.stat().st_uid}: {why}; {remedy}"
    # Whoever owns it, or the link in its place, chooses which files the next start removes, and what is measured.
    owners = {path.lstat().st_uid, path.stat().st_uid} - {0, os.geteuid()}
    if owners:
        return f"{path} belongs to uid {min(owners)}, and this is uid {os.geteuid()}; remove it, {remedy}"
    return ""


def _why_not_writable(directory: Path) -> str:
    if os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    return os.strerror(errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES)


def clear_stale_files(directory: Path) -> None:
    """Remove what earlier lives of the same server left in its directory.

    Raises:
        RegistryError: A file is held by a running process, that is, the same server runs already (nothing is removed
            then); or a file cannot be looked at or removed.
    """
    try:
        _clear(directory)
    except OSError as error:
        raise RegistryError(
            f"cannot clear {error.filename or directory} of an earlier start: {error.strerror}; "
            "remove it, or set EAGLE_EXPORTER_DIR to a directory of this user"
        ) from error


def _clear(directory: Path) -> None:
    files = [path for path in directory.iterdir() if path.suffix == fmt.FILE_SUFFIX or path.name.startswith(".tmp-")]
    for path in files:
        if path.suffix == fmt.FILE_SUFFIX and is_held(path):
            raise RegistryError(
                f"{path} is in use by a running server of the same name; this server is not measured. "
                "Set EAGLE_EXPORTER_SERVER to give it a name of its own"
            )
    for path in files:
        path.unlink(missing_ok=True)
    # A restarted server measures: "off" was said to the one that is gone.
    (directory / fmt.CONTROL_FILE).unlink(missing_ok=True)
    shutil.rmtree(directory / fmt.CAPTURES_DIRECTORY, ignore_errors=True)


def is_held(path: Path) -> bool:
    """Return whether another process holds the record lock of a registry file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return lock_is_held(descriptor)
    finally:
        os.close(descriptor)


# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")


def lock_is_held(descriptor: int) -> bool:
    """Return whether another process holds a POSIX record lock on an open file; a read-only descriptor will do.

    The kernel drops the lock when its holder ends, also after SIGKILL, and needs no pid to answer, so this works
    across containers that share the mount.
    """
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class RankWriter:
    """The only writer of one rank's file.

    Attributes:
        values: One float64 per slot; change them freely, then `commit`.
        layout: Where each series lies in `values`.
    """

    def __init__(self, path: Path, layout: Layout, *, group: str | None = None, **header: Any) -> None:
        """Create the file at `path`, whole: it appears under its name only when it is complete.

        Args:
            path: Final path. A file there is replaced, never opened, so that readers of the old one keep it.
            layout: The series.
            group: Group that may read; None leaves what the directory's setgid bit gives.
            header: More facts for the JSON header.

        Raises:
            RegistryError: No space (a full /dev/shm), no permission, or the path is held by another writer.
        """
        if is_held(path):
            raise RegistryError(f"{path} is in use by a running server of the same name; this rank is not measured")
        self.path = path
        self.layout = layout
        self.values = array("d", layout.initial_values())
        self._descriptor, self._map = _create(path, layout, self.values, group, header)
        buffer = memoryview(self._map)
        slots = layout.slots
        offset = struct.unpack_from("<Q", self._map, 16)[0]
        first = buffer[offset : offset + 8 * slots].cast("d")
        second = buffer[offset + 8 * slots : offset + 16 * slots].cast("d")
        self._buffers = (first, second)
        self._sequence_cell = buffer[fmt.SEQUENCE_OFFSET : fmt.SEQUENCE_OFFSET + 8].cast("Q")
        self._sequence = 0
        self._views: list[memoryview[Any]] = [buffer, first, second, self._sequence_cell]

    def commit(self) -> None:
        """Publish `values` as one consistent snapshot."""
        sequence = self._sequence + 1
        self._buffers[sequence & 1][:] = memoryview(self.values)[: self.layout.slots]
        _store_barrier()
        self._sequence_cell[0] = sequence
        self._sequence = sequence
        _store_barrier()

    def observe(self, start: int, bounds: tuple[float, ...], value: float) -> None:
        """Add one observation to the histogram that starts at slot `start`."""
        self.values[start + bisect_left(bounds, value)] += 1.0
        self.values[start + len(bounds) + 1] += value

    def close(self) -> None:
        """Give up the file: its lock is free from now on, the file stays."""
        if self._descriptor < 0:
            return
        for view in reversed(self._views):
            view.release()
        self._views.clear()
        self._map.close()
        os.close(self._descriptor)
        self._descriptor = -1


def _create(
    path: Path, layout: Layout, values: array[float], group: str | None, header: dict[str, Any]
) -> tuple[int, mmap.mmap]:
    text = layout.describe(**header)
    offset = math.ceil((fmt.HEADER.size + len(text)) / 64) * 64
    size = offset + 16 * layout.slots
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    descriptor = -1
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        # On a full tmpfs a sparse mapping would be killed by SIGBUS at the first write; allocating asks beforehand.
        os.posix_fallocate(descriptor, 0, size)
        os.fchmod(descriptor, 0o640)
        _give_to_group(descriptor, group, 0o640, temporary)
        prefix = fmt.HEADER.pack(
            fmt.MAGIC, fmt.MAJOR_VERSION, fmt.MINOR_VERSION, len(text), offset, layout.slots, 0, time.time_ns()
        )
        os.pwrite(descriptor, prefix + text, 0)
        os.pwrite(descriptor, values.tobytes(), offset)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mapped = mmap.mmap(descriptor, size)
        temporary.rename(path)
    except (OSError, RegistryError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        temporary.unlink(missing_ok=True)
        if isinstance(error, RegistryError):
            raise
        remedy = (
            "free space there (docker: --shm-size) or set EAGLE_EXPORTER_DIR to another file system"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "set EAGLE_EXPORTER_DIR to a directory that this user can write"
        )
        raise RegistryError(f"cannot create the registry file {path}: {error.strerror}; {remedy}") from error
    return descriptor, mapped


def _give_to_group(target: Path | int, group: str | None, mode: int, name: Path | None = None) -> None:
    """Hand a path, or a descriptor with the name it has in messages, to a group."""
    if group:
        try:
            gid = int(group) if group.isdigit() else _group_id(group)
            os.chown(target, -1, gid)
        except (KeyError, PermissionError) as error:
            raise RegistryError(
                f"EAGLE_EXPORTER_GROUP={group}: cannot give {name or target} to this group ({error}); "
                "name a group that exists and that this user is in"
            ) from error
    os.chmod(target, mode)


def _group_id(name: str) -> int:
    import grp

    return grp.getgrnam(name).gr_gid


def _no_barrier() -> None:
    """x86 keeps stores in order."""


_lock = threading.Lock()


def _lock_barrier() -> None:
    # An uncontended lock never waits; acquiring and releasing it orders the stores around it on weakly ordered CPUs
    # (aarch64: Grace).
    with _lock:
        pass


_store_barrier = _no_barrier if platform.machine() in ("x86_64", "AMD64", "i686") else _lock_barrier
