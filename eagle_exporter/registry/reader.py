"""Reading a registry: consistent snapshots, liveness, and quarantine of what is not one of our files.

Readers use ``pread`` and never map a file: a mapping that is truncated under its reader ends in SIGBUS. Nothing that
a file says is trusted: names, labels and offsets are checked before use, and a file that fails is skipped and
counted, never an error of the whole read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from eagle_exporter import catalogue
from eagle_exporter.registry import layout as fmt
from eagle_exporter.registry.writer import lock_is_held

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_MAX_LABEL_LENGTH = 1024
_MAX_FILES = 4096
_ATTEMPTS = 50


class UnusableFile(Exception):
    """A file that is not shown.

    Attributes:
        reason: One of `catalogue.SKIPPED_REASONS`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Series:
    """One series of a family.

    Attributes:
        labels: Values of the family's own labels, without the common ones.
        value: Value of a counter, gauge or info; the sum of a histogram.
        buckets: Counts per bucket, not cumulative, the +Inf bucket last; empty for other types.
    """

    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Family:
    """One metric family of one rank."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True)
class RankSnapshot:
    """The state of one rank at one moment.

    Attributes:
        path: The file.
        directory: Name of the server's directory.
        labels: Values of `catalogue.COMMON_LABELS`.
        created: Unix seconds at which the file was created.
        alive: Its writer still holds the record lock.
        inode: ``(st_dev, st_ino)``: tells one life of a rank from the next.
        families: Only families with at least one series that exists.
        catalogue_version: Version of the catalogue that the writer used.
        hook_problems: Hook -> why it could not be attached, as the server's log says it.
    """

    path: Path
    directory: str
    labels: dict[str, str]
    created: float
    alive: bool
    inode: tuple[int, int]
    families: tuple[Family, ...]
    catalogue_version: str
    hook_problems: dict[str, str]

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the rank: its common label values."""
        return tuple(self.labels[name] for name in catalogue.COMMON_LABELS)

    def family(self, name: str) -> Family | None:
        """Return a family by name."""
        return next((family for family in self.families if family.name == name), None)

    def value(self, name: str, *labels: str) -> float | None:
        """Return the value of one scalar series, None when it does not exist."""
        family = self.family(name)
        if family is None:
            return None
        return next((series.value for series in family.series if series.labels == labels), None)


@dataclass(frozen=True)
class _Header:
    """What does not change during the life of a file."""

    text: dict[str, Any]
    families: tuple[tuple[Family, int], ...]
    labels: dict[str, str]
    offset: int
    slots: int
    created: float


@dataclass(frozen=True)
class RegistrySnapshot:
    """All ranks of a registry root at one moment.

    Attributes:
        ranks: One per label set (the newest file where several claim the same), sorted by labels.
        skipped: Path -> reason, for files that could not be used.
        taken: Unix seconds.
    """

    ranks: tuple[RankSnapshot, ...]
    skipped: dict[Path, str]
    taken: float


class RegistryReader:
    """Reads every rank under a registry root. Not thread-safe; make one per thread, or lock."""

    def __init__(self, root: Path) -> None:
        """Prepare to read `root`; it need not exist yet."""
        self.root = root
        self._headers: dict[tuple[int, int], _Header] = {}

    def read(self) -> RegistrySnapshot:
        """Read all ranks.

        Raises:
            NotADirectoryError: The root exists and is no directory.
            PermissionError: The root cannot be listed.
        """
        ranks: dict[tuple[str, ...], RankSnapshot] = {}
        skipped: dict[Path, str] = {}
        seen: set[tuple[int, int]] = set()
        for path in self._files(skipped):
            try:
                snapshot = self._read_file(path)
            except UnusableFile as error:
                skipped[path] = error.reason
                continue
            if snapshot is None:
                continue
            seen.add(snapshot.inode)
            rival = ranks.get(snapshot.key)
            if rival is not None:
                older = min(rival, snapshot, key=lambda rank: (rank.created, str(rank.path)))
                skipped[older.path] = "duplicate"
                if older is snapshot:
                    continue
            ranks[snapshot.key] = snapshot
        self._headers = {inode: header for inode, header in self._headers.items() if inode in seen}
        return RegistrySnapshot(tuple(ranks[key] for key in sorted(ranks)), skipped, time.time())

    def _files(self, skipped: dict[Path, str]) -> list[Path]:
        try:
            servers = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        files: list[Path] = []
        for server in servers:
            directory = self.root / server
            try:
                names = sorted(os.listdir(directory))
            except FileNotFoundError:
                continue
            except OSError:
                skipped[directory] = "unreadable"
                continue
            files += [directory / name for name in names if name.endswith(fmt.FILE_SUFFIX) and not name.startswith(".")]
        return files[:_MAX_FILES]

    def _read_file(self, path: Path) -> RankSnapshot | None:
        """Return a snapshot, or None when the file vanished meanwhile."""
        try:
            # O_NONBLOCK: a FIFO put in place of a file must not hang a scrape.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = "not_a_file" if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO) else "unreadable"
            raise UnusableFile(reason, f"{path}: {error.strerror}") from error
        try:
            return self._read_descriptor(path, descriptor)
        except OSError as error:
            raise UnusableFile("unreadable", f"{path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _read_descriptor(self, path: Path, descriptor: int) -> RankSnapshot:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableFile("not_a_file", f"{path} is not a regular file")
        inode = (status.st_dev, status.st_ino)
        # Asked before the values are read: a rank that dies between the two is then shown once more with its last
        # values, never with older ones.
        alive = lock_is_held(descriptor)
        header = self._header(path, descriptor, status)
        values = _read_values(path, descriptor, header)
        families: list[Family] = []
        for family, start in header.families:
            series = _fill(family, start, values)
            if series is None:
                raise UnusableFile("corrupt", f"{path}: impossible value in {family.name}")
            if series:
                families.append(Family(family.name, family.kind, family.help, family.labels, family.bounds, series))
        return RankSnapshot(
            path=path,
            directory=path.parent.name,
            labels=header.labels,
            created=header.created,
            alive=alive,
            inode=inode,
            families=tuple(families),
            catalogue_version=str(header.text.get("catalogue", "")),
            hook_problems=_texts(header.text.get("hooks")),
        )

    def _header(self, path: Path, descriptor: int, status: os.stat_result) -> _Header:
        fixed = os.pread(descriptor, fmt.HEADER.size, 0)
        if len(fixed) < fmt.HEADER.size:
            raise UnusableFile("truncated", f"{path} is shorter than a header")
        magic, major, _minor, length, offset, slots, _sequence, created = fmt.HEADER.unpack(fixed)
        if magic != fmt.MAGIC:
            raise UnusableFile("foreign", f"{path} is not a registry file")
        if major != fmt.MAJOR_VERSION:
            raise UnusableFile("major_version", f"{path} has format {major}, this exporter reads {fmt.MAJOR_VERSION}")
        if length > fmt.MAX_HEADER_BYTES or slots > fmt.MAX_SLOTS or offset < fmt.HEADER.size + length or offset % 8:
            raise UnusableFile("corrupt", f"{path} has an impossible header")
        if status.st_size < offset + 16 * slots:
            raise UnusableFile("truncated", f"{path} is shorter than its header says")
        text = os.pread(descriptor, length, fmt.HEADER.size)
        if len(text) < length:
            raise UnusableFile("truncated", f"{path} is shorter than its header says")
        inode = (status.st_dev, status.st_ino)
        known = self._headers.get(inode)
        # The inode number of a removed file is soon used again, so the text itself decides whether the parsed header
        # still holds.
        if (
            known is not None
            and known.text.get("") == text
            and (known.offset, known.slots, known.created) == (offset, slots, created / 1e9)
        ):
            return known
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnusableFile("corrupt", f"{path}: header is not JSON") from error
        if not isinstance(parsed, dict):
            raise UnusableFile("corrupt", f"{path}: header is not an object")
        labels = _parse_labels(path, parsed)
        families = _parse_families(path, parsed, slots)
        parsed = {"catalogue": parsed.get("catalogue", ""), "hooks": parsed.get("hooks"), "": text}
        header = _Header(parsed, families, labels, offset, slots, created / 1e9)
        self._headers[inode] = header
        return header


def _texts(value: object) -> dict[str, str]:
    """Return a dictionary of texts, whatever another version has written in its place."""
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}


def _read_values(path: Path, descriptor: int, header: _Header) -> tuple[float, ...]:
    for _ in range(_ATTEMPTS):
        before = os.pread(descriptor, 8, fmt.SEQUENCE_OFFSET)
        if len(before) < 8:
            raise UnusableFile("truncated", f"{path} was truncated")
        size = 8 * header.slots
        buffer = struct.unpack("<Q", before)[0] & 1
        data = os.pread(descriptor, size, header.offset + buffer * size)
        if len(data) < size:
            raise UnusableFile("truncated", f"{path} was truncated")
        if os.pread(descriptor, 8, fmt.SEQUENCE_OFFSET) == before:
            return struct.unpack(f"<{header.slots}d", data)
    raise UnusableFile("unreadable", f"{path} changes too fast to be read")


def _fill(family: Family, start: int, values: Sequence[float]) -> tuple[Series, ...] | None:
    """Return the series that exist; None when a value is impossible for the type."""
    result: list[Series] = []
    if family.kind != "histogram":
        for i, shell in enumerate(family.series):
            value = values[start + i]
            if math.isnan(value):
                continue
            if family.kind != "gauge" and not 0 <= value < math.inf:
                return None
            result.append(Series(shell.labels, value))
        return tuple(result)
    width = len(family.bounds) + 2
    for i, shell in enumerate(family.series):
        first = start + i * width
        counts = values[first : first + width - 1]
        total = values[first + width - 1]
        if math.isnan(total):
            continue
        if not 0 <= total < math.inf or not all(0 <= count < 2**53 and count == int(count) for count in counts):
            return None
        result.append(Series(shell.labels, total, tuple(int(count) for count in counts)))
    return tuple(result)


def _parse_labels(path: Path, parsed: dict[str, Any]) -> dict[str, str]:
    labels = parsed.get("labels")
    if not isinstance(labels, dict):
        raise UnusableFile("corrupt", f"{path}: no labels")
    result = {name: labels.get(name, "") for name in catalogue.COMMON_LABELS}
    for value in result.values():
        if not _is_label_value(value):
            raise UnusableFile("corrupt", f"{path}: bad label value")
    return result


def _is_label_value(value: object) -> bool:
    if not isinstance(value, str) or len(value) > _MAX_LABEL_LENGTH:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no exposition format can carry
        return False
    return True


def _parse_families(path: Path, parsed: dict[str, Any], slots: int) -> tuple[tuple[Family, int], ...]:
    families: list[tuple[Family, int]] = []
    entries = parsed.get("families")
    if not isinstance(entries, list):
        raise UnusableFile("corrupt", f"{path}: no families")
    names: set[str] = set()
    for entry in entries:
        family = _parse_family(entry, slots)
        if family is None:
            raise UnusableFile("corrupt", f"{path}: bad family description")
        if family[0].name in names:
            raise UnusableFile("corrupt", f"{path}: {family[0].name} is described twice")
        names.add(family[0].name)
        known = catalogue.BY_NAME.get(family[0].name)
        # A reader shows what it knows and skips what it does not: a newer writer may have more families, or more
        # labels in one of them.
        if (
            known is None
            or known.source is not catalogue.Source.RANK
            or known.kind.value != family[0].kind
            or known.labels != family[0].labels
        ):
            continue
        shell, start = family
        families.append((Family(known.name, shell.kind, known.help, known.labels, shell.bounds, shell.series), start))
    return tuple(families)


def _parse_family(entry: Any, slots: int) -> tuple[Family, int] | None:
    if not isinstance(entry, dict):
        return None
    name, kind, start = entry.get("name"), entry.get("type"), entry.get("slot")
    labels, rows, bounds = entry.get("labels"), entry.get("series"), entry.get("bounds", [])
    if not (
        isinstance(name, str)
        and _NAME.fullmatch(name)
        and isinstance(kind, str)
        and isinstance(start, int)
        and start >= 0
        and isinstance(labels, list)
        and all(isinstance(label, str) and _NAME.fullmatch(label) for label in labels)
        and isinstance(rows, list)
        and isinstance(bounds, list)
        and all(isinstance(bound, (int, float)) and abs(bound) <= sys.float_info.max for bound in bounds)
        and all(low < high for low, high in pairwise(bounds))
    ):
        return None
    if not all(isinstance(row, list) and len(row) == len(labels) and all(map(_is_label_value, row)) for row in rows):
        return None
    if len({tuple(row) for row in rows}) != len(rows):
        return None
    width = len(bounds) + 2 if kind == "histogram" else 1
    if start + width * len(rows) > slots:
        return None
    shells = tuple(Series(tuple(row), math.nan) for row in rows)
    return Family(name, kind, "", tuple(labels), tuple(float(bound) for bound in bounds), shells), start
