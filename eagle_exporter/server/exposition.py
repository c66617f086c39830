"""What a scrape asks for, and rendering it beside the event loop."""

from __future__ import annotations

import asyncio
import gzip
import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client import exposition as text_format
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics_format
from prometheus_client.registry import Collector

from eagle_exporter.server.collector import OneRead, RegistryCollector, number_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle_exporter.server.worker import Worker

DEFAULT_DEADLINE_SECONDS = 10.0
"""Deadline of a scrape that names none; Prometheus' own default."""
_DEADLINE_MARGIN_SECONDS = 0.5
_GZIP_LEVEL = 5
_MAX_WAITING = 64
_END = "# EOF\n"
_ESCAPING = ("allow-utf-8", "underscores", "dots", "values")
"""Schemes for names outside the classic character set. No name of ours is, so all make the same page."""


@dataclass(frozen=True)
class Format:
    """A text format.

    Attributes:
        name: ``openmetrics`` or ``text``.
        content_type: What the response says it is.
    """

    name: str
    content_type: str


TEXT = Format("text", "text/plain; version=0.0.4; charset=utf-8")


@dataclass(frozen=True)
class _Range:
    media_type: str
    parameters: dict[str, str]
    quality: float


def negotiate(accept: str | None) -> Format:
    """Choose the format a client likes best.

    The highest q-value wins, among equals the one named first. A client that accepts none of the formats gets
    the classic text format, as from every Prometheus exporter.

    Args:
        accept: The Accept header, None when there is none.
    """
    ranges = [item for item in _parse(accept or "") if item.quality > 0]
    for item in sorted(ranges, key=lambda item: -item.quality):
        found = _format_for(item)
        if found is not None:
            return found
    return TEXT


def accepts_gzip(accept_encoding: str | None) -> bool:
    """Return whether a client takes gzip."""
    qualities = {item.media_type: item.quality for item in _parse(accept_encoding or "")}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def deadline_seconds(header: str | None) -> float:
    """Return how long a scrape may take.

    Args:
        header: ``X-Prometheus-Scrape-Timeout-Seconds``; nonsense counts as absent.
    """
    try:
        timeout = float(header) if header else DEFAULT_DEADLINE_SECONDS
    except ValueError:
        timeout = DEFAULT_DEADLINE_SECONDS
    if not math.isfinite(timeout) or timeout <= 0:
        timeout = DEFAULT_DEADLINE_SECONDS
    # Leave the client the time to receive the answer before it gives up by itself.
    return max(timeout - min(_DEADLINE_MARGIN_SECONDS, timeout / 10), 0.001)


def render(read: OneRead, *, openmetrics: bool) -> bytes:
    """Return a page, byte for byte as prometheus_client writes it.

    Its encoders sort and escape the labels of every sample on every scrape: a third of a second for the 20,000
    series of 64 ranks. Here that is done once in the life of a rank, see `Labels`.

    Args:
        read: The families, whose samples have `Labels`.
        openmetrics: OpenMetrics 1.0.0 instead of the text format.
    """
    parts: list[str] = []
    for family in read.collect():
        parts.append(_head(family.name, family.documentation, family.type, openmetrics))
        for sample in family.samples:
            labels: str = sample.labels.text  # type: ignore[attr-defined]
            parts.append(f"{sample.name}{labels} {number_text(sample.value)}\n")
    if openmetrics:
        parts.append(_END)
    return "".join(parts).encode()


@lru_cache(maxsize=1024)
def _head(name: str, documentation: str, kind: str, openmetrics: bool) -> str:
    """Return the comment lines of a family, from the library's own encoder."""
    encode: Callable[..., bytes] = openmetrics_format.generate_latest if openmetrics else text_format.generate_latest
    registry = CollectorRegistry()
    family = Metric(name, documentation, kind)
    registry.register(_Fixed(family))
    return encode(registry).decode().removesuffix(_END)


class _Fixed(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]


class BusyError(Exception):
    """No place is left in the queue; the client should try again later."""


class Renderer:
    """Renders scrapes one by one in a thread; scrapes that wait for the same page share one rendering.

    Sharing never makes an answer old: a scrape joins only a rendering that has not begun yet.
    """

    def __init__(self, collector: RegistryCollector, worker: Worker) -> None:
        """Render what `collector` collects, in `worker`."""
        self._collector = collector
        self._worker = worker
        self._waiting: dict[tuple[Format, frozenset[str] | None, bool], asyncio.Future[bytes]] = {}
        self._lock = threading.Lock()

    async def render(self, wanted: Format, names: frozenset[str] | None, *, compress: bool) -> bytes:
        """Return a page.

        Args:
            wanted: The format.
            names: Only these families, all when None.
            compress: Return it compressed with gzip.

        Raises:
            BusyError: Too many different pages are waiting already.
        """
        key = (wanted, names, compress)
        with self._lock:
            future = self._waiting.get(key)
            if future is None:
                if len(self._waiting) >= _MAX_WAITING:
                    raise BusyError("too many scrapes are waiting")
                future = self._worker.submit(lambda: self._page(key))
                self._waiting[key] = future
        # One scrape that gives up must not cancel the page for the others.
        return await asyncio.shield(future)

    def _page(self, key: tuple[Format, frozenset[str] | None, bool]) -> bytes:
        with self._lock:
            self._waiting.pop(key, None)
        wanted, names, compress = key
        page = render(OneRead(self._collector, names), openmetrics=wanted.name == "openmetrics")
        return gzip.compress(page, _GZIP_LEVEL, mtime=0) if compress else page


def _format_for(item: _Range) -> Format | None:
    version = item.parameters.get("version")
    escaping = item.parameters.get("escaping", "")
    if escaping not in _ESCAPING:
        escaping = ""
    if item.media_type in ("application/openmetrics-text", "application/*") and version in (None, "1.0.0"):
        suffix = f"; escaping={escaping}" if escaping else ""
        return Format("openmetrics", f"application/openmetrics-text; version=1.0.0; charset=utf-8{suffix}")
    if item.media_type == "text/plain" and version == "1.0.0":
        escaping = escaping or "underscores"
        return Format("text", f"text/plain; version=1.0.0; charset=utf-8; escaping={escaping}")
    if item.media_type in ("text/plain", "text/*", "*/*") and version in (None, "0.0.4"):
        return TEXT
    return None


def _parse(header: str) -> list[_Range]:
    result = []
    for part in header.split(","):
        name, *rest = part.split(";")
        if not name.strip():
            continue
        parameters = {}
        for parameter in rest:
            key, _, value = parameter.partition("=")
            parameters[key.strip().lower()] = value.strip().strip('"')
        result.append(_Range(name.strip().lower(), parameters, _quality(parameters.pop("q", "1"))))
    return result


def _quality(text: str) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0
