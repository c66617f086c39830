"""What a client asks for, and sharing one rendering between clients."""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import exposition as text_format
from prometheus_client.openmetrics import exposition as openmetrics_format

from eagle_exporter.server.collector import OneRead, RegistryCollector
from eagle_exporter.server.exposition import (
    TEXT,
    BusyError,
    Renderer,
    accepts_gzip,
    deadline_seconds,
    negotiate,
    render,
)
from eagle_exporter.server.view import RegistryView, View
from eagle_exporter.server.worker import Worker
from tests.ranks import RankProcess

if TYPE_CHECKING:
    from pathlib import Path

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT_004 = "text/plain; version=0.0.4; charset=utf-8"
TEXT_100 = "text/plain; version=1.0.0; charset=utf-8; escaping="


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, TEXT_004),
        ("", TEXT_004),
        ("*/*", TEXT_004),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", TEXT_004),
        ("application/json", TEXT_004),
        # Prometheus 2.42.
        (
            (
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
                "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
            ),
            OPENMETRICS,
        ),
        # Prometheus 3.
        (
            (
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
                "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
                "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
            ),
            f"{OPENMETRICS}; escaping=allow-utf-8",
        ),
        # Prometheus 3 with the text protocol first.
        (
            (
                "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,"
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,*/*;q=0.2"
            ),
            f"{TEXT_100}allow-utf-8",
        ),
        ("text/plain;version=1.0.0", f"{TEXT_100}underscores"),
        ("text/plain; version=1.0.0; escaping=dots", f"{TEXT_100}dots"),
        ("text/plain; version=1.0.0; escaping=values", f"{TEXT_100}values"),
        ("text/plain; version=1.0.0; escaping=nonsense", f"{TEXT_100}underscores"),
        ('text/plain; version="0.0.4"', TEXT_004),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", TEXT_004),
        ("application/openmetrics-text;version=2.0.0, text/plain;q=0.1", TEXT_004),
        # The order of the header does not matter, the q-values do.
        ("application/openmetrics-text;q=0.2, text/plain;q=0.9", TEXT_004),
        ("text/plain;q=0.2, application/openmetrics-text;q=0.9", OPENMETRICS),
        ("application/openmetrics-text;q=0, */*", TEXT_004),
        ("application/openmetrics-text;q=nan, text/plain", TEXT_004),
        ("application/openmetrics-text;q=7, text/plain;q=0.1", TEXT_004),
        ("TEXT/PLAIN;VERSION=0.0.4;q=0.1,Application/OpenMetrics-Text;q=1", OPENMETRICS),
        # A delimited protobuf message is not offered.
        (
            (
                "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
                "text/plain;version=0.0.4;q=0.3"
            ),
            TEXT_004,
        ),
        (";;,,=;q=,", TEXT_004),
    ],
)
def test_the_format_with_the_highest_quality_is_chosen(accept: str | None, expected: str) -> None:
    assert negotiate(accept).content_type == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("identity", False),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("*", True),
        ("*;q=1, gzip;q=0", False),
    ],
)
def test_a_page_is_compressed_only_for_who_takes_gzip(header: str | None, expected: bool) -> None:
    assert accepts_gzip(header) is expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, 9.5),
        ("10", 9.5),
        ("1", 0.9),
        ("0.5", 0.45),
        ("", 9.5),
        ("soon", 9.5),
        ("-1", 9.5),
        ("0", 9.5),
        ("nan", 9.5),
        ("inf", 9.5),
    ],
)
def test_the_deadline_is_a_little_before_the_clients_own(header: str | None, expected: float) -> None:
    assert deadline_seconds(header) == pytest.approx(expected)


class SlowView(RegistryView):
    """A registry whose reads wait for the test."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = 0
        self.go = threading.Event()

    def read(self) -> View:
        self.reads += 1
        assert self.go.wait(10)
        return super().read()


def test_scrapes_that_wait_together_share_one_reading_that_began_after_them(tmp_path: Path) -> None:
    async def scrape_together() -> tuple[list[bytes], int]:
        view = SlowView(tmp_path)
        renderer = Renderer(RegistryCollector(view), Worker("render"))
        first = asyncio.create_task(renderer.render(TEXT, None, compress=False))
        while not view.reads:
            await asyncio.sleep(0.001)
        # The first reading has begun: what these scrapes get must be a later one.
        others = [asyncio.create_task(renderer.render(TEXT, None, compress=False)) for _ in range(50)]
        await asyncio.sleep(0.05)
        view.go.set()
        pages = await asyncio.gather(first, *others)
        return pages, view.reads

    pages, reads = asyncio.run(scrape_together())
    assert reads == 2
    assert len(set(pages[1:])) == 1
    assert all(b"eagle_exporter_build_info" in page for page in pages)


def test_a_scrape_that_gives_up_leaves_the_page_to_the_others(tmp_path: Path) -> None:
    async def give_up() -> bytes:
        view = SlowView(tmp_path)
        renderer = Renderer(RegistryCollector(view), Worker("render"))
        blocking = asyncio.create_task(renderer.render(TEXT, None, compress=False))
        while not view.reads:
            await asyncio.sleep(0.001)
        hasty = asyncio.create_task(renderer.render(TEXT, None, compress=False))
        patient = asyncio.create_task(renderer.render(TEXT, None, compress=False))
        await asyncio.sleep(0.01)
        hasty.cancel()
        view.go.set()
        await blocking
        return await patient

    assert b"eagle_exporter_build_info" in asyncio.run(give_up())


def test_the_queue_of_different_pages_is_bounded(tmp_path: Path) -> None:
    async def flood() -> int:
        view = SlowView(tmp_path)
        renderer = Renderer(RegistryCollector(view), Worker("render"))
        tasks = [
            asyncio.create_task(renderer.render(TEXT, frozenset({f"name{i}"}), compress=False)) for i in range(500)
        ]
        await asyncio.sleep(0.05)
        view.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(result, BusyError) for result in results)

    assert 400 <= asyncio.run(flood()) < 500


def test_compressed_and_plain_pages_are_the_same_page(tmp_path: Path) -> None:
    async def both() -> tuple[bytes, bytes]:
        renderer = Renderer(RegistryCollector(RegistryView(tmp_path)), Worker("render"))
        names = frozenset({"eagle_exporter_build_info"})
        return (
            await renderer.render(TEXT, names, compress=False),
            await renderer.render(TEXT, names, compress=True),
        )

    plain, compressed = asyncio.run(both())
    assert gzip.decompress(compressed) == plain


@pytest.mark.parametrize("openmetrics", [True, False])
def test_a_page_is_byte_for_byte_what_prometheus_client_writes(tmp_path: Path, openmetrics: bool) -> None:
    hostile = 'a"b\\c\nd,e={f} é'
    with RankProcess(tmp_path, {}, {"server": hostile}, {"server": "b:1", "recording": False}) as process:
        process.cycles(7, accepted=2)
        process.set("eagle_last_cycle_timestamp_seconds", 1.7643e9 + 0.25)
        process.set("eagle_kv_pool_tokens", 1e21)
        process.set("eagle_draft_memory_bytes", float("inf"))
        collector = RegistryCollector(RegistryView(tmp_path))
        encode: Any = openmetrics_format.generate_latest if openmetrics else text_format.generate_latest
        expected = encode(OneRead(collector, None))
        page = render(OneRead(collector, None), openmetrics=openmetrics)
    # How long a read takes differs from one to the next.
    duration = re.compile(rb"(eagle_scrape_collector_duration_seconds{[^}]*}) \S+")
    assert duration.sub(rb"\1", page) == duration.sub(rb"\1", expected)
    assert len(page) > 100_000
