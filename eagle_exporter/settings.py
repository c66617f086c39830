"""Settings from the environment, for the exporter and for the hooks.

The exporter refuses a wrong value with an error that names it; the hooks, inside somebody else's server, log one
warning and use the default. Imports nothing of the project but the catalogue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from eagle_exporter import catalogue

PREFIX = "EAGLE_EXPORTER_"

ATTACH = PREFIX + "ATTACH"
"""Environment variable by which the launch tells scheduler processes to attach; set by us, not by people."""
DEFAULT_DIRECTORY = Path("/dev/shm/eagle-exporter")  # noqa: S108 - the registry is shared memory by design
DEFAULT_PORT = 10077
DEFAULT_LISTEN = f"0.0.0.0:{DEFAULT_PORT}"

SHORTEST_PROFILE_INTERVAL = 600.0
"""Seconds: a capture stalls its tensor-parallel group for some tenths of a second."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

T = TypeVar("T")


class SettingError(ValueError):
    """A variable has a value that cannot be used; the message names it, the value, and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """Every ``EAGLE_EXPORTER_*`` variable.

    Attributes:
        enabled: ``auto`` (under a server, with a speculative algorithm), ``1`` or ``0``.
        directory: Root of the shared registry.
        server: Name of the server, None to derive it from host and port.
        embed: Start an exporter beside the server.
        listen: Address of that exporter.
        clock: ``auto``, ``cuda_event``, ``host`` or ``sync``.
        sample_every: Time every n-th cycle, None for automatic.
        histograms: ``leader`` or ``all``.
        draft_step_events: Record events inside the draft graph.
        buckets: Upper bounds of duration buckets, seconds.
        baseline: Batch size label -> configured seconds of a decode step without speculation.
        group: Group that may read the registry.
        profile_every: Seconds between scheduled kernel captures, None for none.
        kernel_classes: File with further patterns of kernel names, None for none.
        log_level: Level of the exporter's log.
        problems: What was wrong with the environment, in sentences; empty when all is well.
    """

    enabled: str = "auto"
    directory: Path = DEFAULT_DIRECTORY
    server: str | None = None
    embed: bool = True
    listen: str = DEFAULT_LISTEN
    clock: str = "auto"
    sample_every: int | None = None
    histograms: str = "leader"
    draft_step_events: bool = True
    buckets: tuple[float, ...] = catalogue.DURATION_BUCKETS
    baseline: Mapping[str, float] = field(default_factory=dict)
    group: str | None = None
    profile_every: float | None = None
    kernel_classes: Path | None = None
    log_level: str = "info"
    problems: tuple[str, ...] = ()


def read(environment: Mapping[str, str] | None = None, *, strict: bool = False) -> Settings:
    """Read the settings.

    Args:
        environment: ``os.environ`` by default.
        strict: Raise for the first wrong value instead of noting it in `Settings.problems`.

    Raises:
        SettingError: With `strict`, a value that cannot be used.
    """
    env = os.environ if environment is None else environment
    problems: list[str] = []

    def get(name: str, parse: Callable[[str], T], default: T) -> T:
        text = env.get(PREFIX + name, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            message = f"{PREFIX}{name}={text!r}: {error}"
            if strict:
                raise SettingError(message) from error
            problems.append(message + "; the default is used")
            return default

    return Settings(
        enabled=get("ENABLED", _choice("auto", "1", "0"), "auto"),
        directory=get("DIR", _absolute_path, DEFAULT_DIRECTORY),
        server=get("SERVER", _server_name, None),
        embed=get("EMBED", _switch, True),
        listen=get("LISTEN", str, DEFAULT_LISTEN),
        clock=get("CLOCK", _choice("auto", "cuda_event", "host", "sync"), "auto"),
        sample_every=get("SAMPLE_EVERY", _sample_every, None),
        histograms=get("HISTOGRAMS", _choice("leader", "all"), "leader"),
        draft_step_events=get("DRAFT_STEP_EVENTS", _switch, True),
        buckets=get("BUCKETS", parse_buckets, catalogue.DURATION_BUCKETS),
        baseline=get("BASELINE_DECODE_SECONDS", parse_baseline, {}),
        group=get("GROUP", str, None),
        profile_every=get("PROFILE_EVERY", _interval, None),
        kernel_classes=get("KERNEL_CLASSES", _absolute_path, None),
        log_level=get("LOG_LEVEL", _choice("debug", "info", "warning", "warn", "error"), "info"),
        problems=tuple(problems),
    )


def child_environment() -> dict[str, str]:
    """Return the environment for a process of our own that one of SGLang's starts.

    Without the word to schedulers, and without SGLang's multiprocess directory, which prometheus_client would share.
    """
    hidden = (ATTACH, "PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def parse_buckets(text: str) -> tuple[float, ...]:
    """Parse comma-separated bucket bounds in seconds.

    Raises:
        ValueError: Not numbers, not positive and finite, or not strictly increasing.
    """
    try:
        bounds = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError("wanted increasing seconds such as 0.001,0.01,0.1") from error
    if not all(0 < bound < math.inf for bound in bounds):
        raise ValueError("bucket bounds are positive, finite seconds")
    if not all(low < high for low, high in pairwise(bounds)):
        raise ValueError("bucket bounds must increase")
    if len(bounds) > 200:
        raise ValueError("at most 200 buckets")
    return bounds


def parse_baseline(text: str) -> dict[str, float]:
    """Parse ``1=0.0111,8=0.0135``: batch size label = seconds of one decode step without speculation.

    Raises:
        ValueError: Malformed, or seconds that are not positive and finite.
    """
    baseline: dict[str, float] = {}
    for part in text.split(","):
        size, separator, seconds = part.partition("=")
        size = size.strip()
        if not separator or size not in catalogue.BATCH_SIZES:
            size_number = int(size) if size.isascii() and size.isdigit() else 0
            size = catalogue.batch_size_label(size_number) if separator and size_number else ""
        if not size:
            raise ValueError("wanted batch_size=seconds pairs such as 1=0.0111,8=0.0135")
        value = _number(seconds)
        if not 0 < value < math.inf:
            raise ValueError("a baseline is a positive number of seconds")
        if size in baseline:
            raise ValueError(f"two values for batch size {size}")
        baseline[size] = value
    return baseline


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.lower()
        if value not in allowed:
            raise ValueError(f"wanted one of {', '.join(allowed)}")
        return value

    return parse


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("wanted 1 or 0")
    return text == "1"


def _absolute_path(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ValueError("wanted an absolute path")
    return path


def _server_name(text: str) -> str | None:
    if len(text) > 200 or not text.isprintable():
        raise ValueError("wanted at most 200 printable characters")
    return text


def _sample_every(text: str) -> int | None:
    if text.lower() == "auto":
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError("wanted auto or a number from 1")
    return int(text)


def _number(text: str) -> float:
    """Return a number; NaN, which is in no range, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _interval(text: str) -> float | None:
    if text.lower() == "off":
        return None
    unit = _UNITS.get(text[-1].lower())
    value = _number(text[:-1] if unit else text) * (unit or 1.0)
    if not SHORTEST_PROFILE_INTERVAL <= value < math.inf:
        raise ValueError(f"wanted off, or an interval such as 6h or 900s of at least {SHORTEST_PROFILE_INTERVAL:g} s")
    return value
