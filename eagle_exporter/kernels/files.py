"""Where captures lie, and the small files they leave. The only part that the scheduler uses too.

``captures`` in a server's directory holds, for a capture ``ID`` of the rank ``tp0-pp0-dp0``::

    .raw-tp0-pp0-dp0.ID/         mode 0700, while the capture runs: the profiler's trace, and the hooks' boundaries
    tp0-pp0-dp0.ID.json          the result
    tp0-pp0-dp0.ID.trace.json.gz the trace for Perfetto
    stopped                      ID of the capture that stopped last; the other ranks wait for it

Identifiers are times in hexadecimal, so that names sort by age.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_exporter.registry.layout import CAPTURES_DIRECTORY

CLASS_FILE = "EAGLE_EXPORTER_KERNEL_CLASSES"
"""Environment variable that names a file with more patterns, see `eagle_exporter.kernels.classes`."""

STOPPED = "stopped"
RAW_TRACE = "trace.json"
RAW_CYCLES = "cycles.json"

MAX_CYCLES = 50
MAX_SECONDS = 600.0
"""Longest time a request may wait for its cycles."""
MAX_RAW_BYTES = 128 * 1024 * 1024
MAX_TRACE_BYTES = 32 * 1024 * 1024
MAX_RESULT_BYTES = 512 * 1024
KEEP_RESULTS = 3
KEEP_TRACES = 1
RAW_SECONDS = 900.0
"""A raw directory older than this belongs to nobody any more."""

_NAME = re.compile(r"(?P<rank>tp\d{1,6}-pp\d{1,6}-dp\d{1,6})\.(?P<id>[0-9a-f]{14})(?P<kind>\.json|\.trace\.json\.gz)")
_RANK = re.compile(r"tp\d{1,6}-pp\d{1,6}-dp\d{1,6}")
_ID = re.compile(r"[0-9a-f]{14}")


@dataclass(frozen=True)
class Bounds:
    """How much one capture may hold, so that the server's memory and its stall stay bounded.

    Attributes:
        cycles: Cycles that can be asked for.
        events: Events of the profiler that are written out; the scheduler waits for each.
        raw_bytes_per_cycle: What a cycle takes in the profiler's trace, for the free space that is asked for.
    """

    cycles: int
    events: int
    raw_bytes_per_cycle: int


ON_GPU = Bounds(cycles=MAX_CYCLES, events=100_000, raw_bytes_per_cycle=1_000_000)
"""With CUDA graphs a cycle has some hundred kernels; 0.6 MB were seen for one (a dense model, 32 layers)."""
ON_CPU = Bounds(cycles=20, events=300_000, raw_bytes_per_cycle=3_000_000)
"""Without a GPU the profiler sees operators: with the demo 10,000 a cycle, of 280 bytes in the trace and 1.6 kB of
memory. To stop and to write 300,000 takes it 5 seconds."""


@dataclass(frozen=True)
class Request:
    """A capture that is asked for.

    Attributes:
        id: Identifier, see `new_id`.
        rank: Name of the rank's file without its suffix.
        cycles: Cycles to capture.
        seconds: Seconds after which the request ends with what it has.
    """

    id: str
    rank: str
    cycles: int
    seconds: float

    def encode(self) -> str:
        """Return it as a command of the control file."""
        return f"profile id={self.id} rank={self.rank} cycles={self.cycles} seconds={self.seconds:g}"

    @classmethod
    def decode(cls, command: str) -> Request:
        """Read a command of the control file.

        Raises:
            ValueError: It is no valid request; the message says what is wrong.
        """
        given = dict(word.partition("=")[::2] for word in command.split()[1:])
        identifier, rank = given.get("id", ""), given.get("rank", "")
        if not _ID.fullmatch(identifier):
            raise ValueError("id is not 14 hexadecimal digits")
        if not _RANK.fullmatch(rank):
            raise ValueError("rank is not of the form tp0-pp0-dp0")
        try:
            cycles, seconds = int(given.get("cycles", "10")), float(given.get("seconds", "60"))
        except ValueError:
            raise ValueError("cycles or seconds is not a number") from None
        if not 1 <= cycles <= MAX_CYCLES:
            raise ValueError(f"cycles must be from 1 to {MAX_CYCLES}")
        if not 0 < seconds <= MAX_SECONDS:
            raise ValueError(f"seconds must be above 0 and at most {MAX_SECONDS:g}")
        return cls(identifier, rank, cycles, seconds)


def new_id() -> str:
    """Return an identifier: microseconds since 1970 as 14 hexadecimal digits."""
    return f"{time.time_ns() // 1000:014x}"


def is_id(text: str) -> bool:
    """Return whether a text is an identifier."""
    return _ID.fullmatch(text) is not None


def directory_of(server: Path) -> Path:
    """Return the directory of a server's captures."""
    return server / CAPTURES_DIRECTORY


def make_directory(server: Path) -> Path:
    """Return the directory of a server's captures, made when it is missing.

    Raises:
        OSError: It cannot be made.
    """
    path = directory_of(server)
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        # Readable by the exporter's group like the server's directory, whose group it inherits.
        path.chmod(0o2750)
    return path


def raw_path(server: Path, rank: str, identifier: str) -> Path:
    """Return the directory of a capture's raw files."""
    return directory_of(server) / f".raw-{rank}.{identifier}"


def result_path(server: Path, rank: str, identifier: str) -> Path:
    """Return the path of a result."""
    return directory_of(server) / f"{rank}.{identifier}.json"


def trace_path(server: Path, rank: str, identifier: str) -> Path:
    """Return the path of the trace for Perfetto."""
    return directory_of(server) / f"{rank}.{identifier}.trace.json.gz"


def write(path: Path, data: bytes) -> None:
    """Write a file whole, readable by the group.

    Raises:
        OSError: It cannot be written; nothing is left behind then.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o640)
            file.write(data)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object whole.

    Raises:
        OSError: It cannot be written.
    """
    write(path, json.dumps(value, separators=(",", ":")).encode())


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; a link is not followed, nothing is waited for.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file, or longer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"{path} is longer than {limit} bytes")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is longer than {limit} bytes")
    return data


def read_json(path: Path, limit: int = MAX_RESULT_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON object, or too long.
    """
    try:
        value = json.loads(read_bytes(path, limit))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object")
    return value


@dataclass(frozen=True)
class Found:
    """A file of a capture.

    Attributes:
        path: Where it is.
        rank: The rank it belongs to.
        id: The capture.
        is_trace: It is the trace, not the result.
    """

    path: Path
    rank: str
    id: str
    is_trace: bool


def listing(server: Path) -> Iterator[Found]:
    """Yield the results and traces of a server, the newest first; nothing where there are none."""
    try:
        names = os.listdir(directory_of(server))
    except OSError:
        return
    matches = [found for name in names if (found := _NAME.fullmatch(name))]
    for match in sorted(matches, key=lambda match: (match["id"], match["rank"]), reverse=True):
        yield Found(directory_of(server) / match[0], match["rank"], match["id"], match["kind"] != ".json")


def note_stopped(server: Path, identifier: str) -> None:
    """Tell the other ranks that a capture has stopped.

    Raises:
        OSError: It cannot be written.
    """
    write(directory_of(server) / STOPPED, identifier.encode())


def has_stopped(server: Path, identifier: str) -> bool:
    """Return whether a capture, or a later one, has stopped."""
    try:
        text = read_bytes(directory_of(server) / STOPPED, 64).decode("ascii", "replace").strip()
    except (OSError, ValueError):
        return False
    return is_id(text) and text >= identifier


def tidy(server: Path, rank: str, *, now: float | None = None) -> None:
    """Remove what a rank has too much of: old results, traces, and raw files that nobody will read. Raises nothing."""
    results = traces = 0
    for found in listing(server):
        if found.rank != rank:
            continue
        if found.is_trace:
            traces += 1
            surplus = traces > KEEP_TRACES
        else:
            results += 1
            surplus = results > KEEP_RESULTS
        if surplus:
            _remove(found.path)
    seconds = time.time() if now is None else now
    try:
        with os.scandir(directory_of(server)) as entries:
            left = [Path(entry.path) for entry in entries if entry.name.startswith((".raw-", ".tmp-"))]
    except OSError:
        return
    for path in left:
        try:
            if seconds - path.lstat().st_mtime > RAW_SECONDS:
                _remove(path)
        except OSError:
            continue


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
