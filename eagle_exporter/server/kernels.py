"""The last kernel captures of every server: what ``/api/v1/kernels`` and its trace answer.

Everything comes from the files that captures leave in the registry. Like a rank's file none of it is trusted: what does
not have the form of a result is left out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle_exporter import __version__
from eagle_exporter.kernels import files
from eagle_exporter.registry.layout import directory_name

_MAX_SERVERS = 256
_MAX_RANKS = 256
_LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class KernelPhase(BaseModel):
    """What one phase of the captured cycles is made of."""

    seconds: Seconds = Field(description="Its own duration, summed over the captured cycles.")
    busy_seconds: Seconds = Field(description="Of it, time in which at least one kernel ran; the rest is idle.")
    kernel_seconds: Seconds = Field(description="Time of all kernels that it launched.")
    kernels: Count = Field(description="Their number.")
    classes: dict[str, Seconds] = Field(description="Kernel time by kernel class; sums to kernel_seconds.")


class KernelTime(BaseModel):
    """One kernel name in one phase."""

    name: str
    phase: str
    kernel_class: str
    seconds: Seconds = Field(description="Summed over the captured cycles.")
    count: Count


class Unclassified(BaseModel):
    """A kernel name that no pattern knows."""

    name: str
    seconds: Seconds
    count: Count


class Rows(BaseModel):
    """Batch sizes of the captured cycles."""

    min: Count
    max: Count


class Capture(BaseModel):
    """The last completed capture of a rank."""

    id: str
    started: Seconds = Field(description="Unix seconds at which the profiler started.")
    ended: Seconds = Field(description="Unix seconds at which it had stopped.")
    device: str = Field(description="cuda: kernels; cpu: operators, where there is no GPU.")
    cycles: Count = Field(description="Captured cycles: the divisor of all seconds.")
    cycles_asked: Count
    rows: Rows = Field(description="Smallest and largest batch of the captured cycles.")
    stall_seconds: dict[str, Seconds] = Field(
        description="What the capture took from the scheduler: start, stop and export."
    )
    phases: dict[str, KernelPhase]
    total_seconds: Seconds = Field(description="Time of all kernels that the profiler saw: phases and outside.")
    total_kernels: Count
    outside_seconds: Seconds = Field(description="Of it, launched outside the cycles: prefills, copies between cycles.")
    outside_kernels: Count
    top: list[KernelTime] = Field(description="The kernels with the most time, by phase and name.")
    unclassified: list[Unclassified] = Field(description="Kernels in cycles that no pattern knows, the longest first.")
    problems: list[str] = Field(description="What makes the numbers doubtful.")
    trace_bytes: Count = Field(
        description="Size of the trace that /api/v1/kernels/trace returns; 0 when there is none."
    )


class Attempt(BaseModel):
    """How the last capture of a rank ended."""

    id: str
    ended: Seconds | None = Field(None, description="Unix seconds.")
    outcome: str = Field(description="completed, failed, busy, refused or withdrawn.")
    reason: str = Field(description="Why there is no result; empty when there is one.")


class CapturedRank(BaseModel):
    """A rank that a capture was asked of."""

    # Older versions of pydantic keep names that begin with model_ for themselves.
    model_config = ConfigDict(protected_namespaces=())

    server: str
    model_name: str
    rank: str = Field(description="For example tp0-pp0-dp0.")
    tp_rank: str
    pp_rank: str
    dp_rank: str = Field(description="Empty without data parallelism.")
    last: Attempt
    capture: Capture | None = Field(description="The last one that was completed; null when none is kept.")


class Kernels(BaseModel):
    """The answer of ``/api/v1/kernels``."""

    version: str = Field(description="Version of the exporter.")
    ranks: list[CapturedRank] = Field(description="Ranks that a capture was asked of, by server and rank.")


def kernels(root: Path) -> bytes:
    """Return the last captures under a registry root: a `Kernels` as JSON.

    Raises:
        OSError: The root exists but cannot be listed.
    """
    ranks = [rank for server in _servers(root) for rank in _ranks(server)]
    ranks.sort(key=lambda rank: (rank.server, rank.rank))
    return Kernels(version=__version__, ranks=ranks).model_dump_json().encode()


def trace(root: Path, server: str, rank: str) -> tuple[str, bytes] | None:
    """Return file name and gzipped trace of a rank's last kept capture, None when there is none.

    Raises:
        OSError: It is there and cannot be read.
    """
    for found in files.listing(root / directory_name(server)):
        if found.is_trace and found.rank == rank:
            try:
                return found.path.name, files.read_bytes(found.path, files.MAX_TRACE_BYTES)
            except (FileNotFoundError, ValueError):
                continue
    return None


def _servers(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    return [root / name for name in names[:_MAX_SERVERS]]


def _ranks(server: Path) -> list[CapturedRank]:
    found: dict[str, CapturedRank] = {}
    done: set[str] = set()
    for file in files.listing(server):
        if file.is_trace or file.rank in done or len(found) >= _MAX_RANKS:
            continue
        try:
            result = files.read_json(file.path)
            attempt = Attempt.model_validate(result)
            labels = {name: str(result["labels"][name]) for name in ("server", *_LABELS)}
            if attempt.id != file.id or directory_name(labels["server"]) != server.name:
                continue
            capture = Capture.model_validate(result) if attempt.outcome == "completed" else None
        except (OSError, ValueError, ValidationError, KeyError, TypeError):
            continue
        rank = found.setdefault(file.rank, CapturedRank(rank=file.rank, last=attempt, capture=None, **labels))
        if capture is not None:
            rank.capture = capture
            done.add(file.rank)
    return list(found.values())
