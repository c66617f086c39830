"""Many ranks, many scrapers, many scrapes; and prometheus_client's multiprocess mode with the same series."""

from __future__ import annotations

import gzip
import os
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from eagle_exporter.catalogue import Kind
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.server.collector import OneRead, RegistryCollector
from eagle_exporter.server.exposition import render
from eagle_exporter.server.view import RegistryView
from tests.ranks import RankProcess
from tests.service.exporter import Answer, Exporter, wait_for
from tests.tools import soak

if TYPE_CHECKING:
    from pathlib import Path

    from eagle_exporter.registry.reader import Family, RankSnapshot

RANKS = 64 if soak() else 16
SCRAPERS = 50 if soak() else 12
SECONDS = 60 if soak() else 5
SCRAPES = 10_000 if soak() else 120


def plans(count: int) -> list[dict[str, object]]:
    """Nodes of eight ranks, one of which records."""
    return [
        {"server": f"node-{index // 8}:30000", "tp_rank": index % 8, "recording": index % 8 == 0}
        for index in range(count)
    ]


def test_parallel_scrapers_of_many_ranks_all_get_a_whole_page_in_time(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    latencies: list[float] = []
    problems: list[str] = []
    sizes: set[tuple[int, int]] = set()

    def scrape(exporter: Exporter, end: float) -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            answer = exporter.get("/metrics", headers={"Accept-Encoding": "gzip"})
            latencies.append(time.monotonic() - started)
            if answer.status != 200:
                problems.append(answer.text)
                continue
            page = gzip.decompress(answer.body)
            sizes.add((len(answer.body), len(page)))
            if page.count(b"\neagle_rank_up{") != RANKS:
                problems.append("ranks are missing")

    with RankProcess(registry, *plans(RANKS)) as process, Exporter(registry) as exporter:
        process.cycles(20)
        end = time.monotonic() + SECONDS
        threads = [threading.Thread(target=scrape, args=(exporter, end)) for _ in range(SCRAPERS)]
        for thread in threads:
            thread.start()
        slowest_health = 0.0
        while time.monotonic() < end:
            started = time.monotonic()
            assert exporter.get("/-/healthy").status == 200
            slowest_health = max(slowest_health, time.monotonic() - started)
            time.sleep(0.2)
        for thread in threads:
            thread.join()
        memory = exporter.memory_bytes() / 2**20
        ours, theirs, series = compare(registry, tmp_path / "multiprocess")
    assert problems == []
    latencies.sort()
    compressed, plain = max(sizes)
    print(
        f"\n{RANKS} ranks, {series} series, {SCRAPERS} scrapers for {SECONDS} s: {len(latencies)} scrapes, "
        f"p50 {latencies[len(latencies) // 2]:.3f} s, p99 {latencies[int(len(latencies) * 0.99)]:.3f} s, "
        f"slowest health check {slowest_health:.3f} s, {plain} bytes ({compressed} compressed), "
        f"{memory:.0f} MiB; "
        f"one page alone {ours * 1e3:.0f} ms, "
        f"prometheus_client's multiprocess collector {theirs * 1e3:.0f} ms "
        f"({theirs / ours:.1f} times)"
    )
    assert latencies[int(len(latencies) * 0.99)] < 9.5
    assert slowest_health < 2
    assert theirs > ours


def compare(registry: Path, directory: Path) -> tuple[float, float, int]:
    """Return seconds per page, ours and of the multiprocess collector, and the number of series."""
    directory.mkdir()
    for pid, rank in enumerate(RegistryReader(registry).read().ranks, start=1):
        write_multiprocess_files(rank, directory, pid)
    collector = RegistryCollector(RegistryView(registry))

    def multiprocess() -> bytes:
        # As its documentation has it: a registry of its own for each scrape.
        one = CollectorRegistry()
        MultiProcessCollector(one, str(directory))  # type: ignore[no-untyped-call]
        return generate_latest(one)

    def ours() -> bytes:
        return render(OneRead(collector, None), openmetrics=False)

    ours()
    series = sum(not line.startswith(b"#") for line in ours().splitlines())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        for make_page, found in zip((ours, multiprocess), times, strict=True):
            started = time.perf_counter()
            page = make_page()
            found.append(time.perf_counter() - started)
            assert b"eagle_cycle_duration_seconds_bucket" in page
    return statistics.median(times[0]), statistics.median(times[1]), series


def write_multiprocess_files(rank: RankSnapshot, directory: Path, pid: int) -> None:
    """Write the series of a rank as prometheus_client would in a process of its own."""
    new_file: Any = MmapedDict
    files = {
        kind: new_file(str(directory / f"{kind}_{pid}.db")) for kind in ("counter", "histogram", "gauge_mostrecent")
    }
    for family in rank.families:
        for series in family.series:
            labels = {**rank.labels, **dict(zip(family.labels, series.labels, strict=True))}
            if family.kind != Kind.HISTOGRAM.value:
                kind = "counter" if family.kind == Kind.COUNTER.value else "gauge_mostrecent"
                files[kind].write_value(key_of(family, "", labels), series.value, 0)
                continue
            bounds = [*(str(bound) for bound in family.bounds), "+Inf"]
            for bound, count in zip(bounds, series.buckets, strict=True):
                files["histogram"].write_value(key_of(family, "_bucket", {**labels, "le": bound}), count, 0)
            files["histogram"].write_value(key_of(family, "_sum", labels), series.value, 0)
    for file in files.values():
        file.close()


def key_of(family: Family, suffix: str, labels: dict[str, str]) -> str:
    return str(mmap_key(family.name, family.name + suffix, list(labels), list(labels.values()), family.help))


def test_memory_stays_flat_over_many_scrapes(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    with RankProcess(registry, *plans(8)) as process, Exporter(registry) as exporter:
        readings = []
        for number in range(SCRAPES):
            if number % 10 == 0:
                process.cycles(1)
            accept = ("application/openmetrics-text", "text/plain")[number % 2]
            encoding = ("gzip", "identity")[number // 2 % 2]
            answer = exporter.get("/metrics", headers={"Accept": accept, "Accept-Encoding": encoding})
            assert answer.status == 200
            if number % 10 == 0:
                assert exporter.get("/api/v1/cycle").status == 200
            if number % (SCRAPES // 20) == 0:
                readings.append(exporter.memory_bytes())
        readings.append(exporter.memory_bytes())
        descriptors = len(os.listdir(f"/proc/{exporter.process.pid}/fd"))
    early, late = readings[len(readings) // 4], readings[-1]
    print(f"\n{SCRAPES} scrapes: {early / 2**20:.1f} MiB after a quarter, {late / 2**20:.1f} MiB at the end")
    # Five minutes of readings for the live page fill up meanwhile.
    assert late - early < 6 * 2**20
    assert descriptors < 30


def test_it_starts_quickly_and_needs_little_memory(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    with RankProcess(registry, *plans(8)) as process:
        process.cycles(10)
        startups, memory = [], 0.0
        for _ in range(3):
            with Exporter(registry) as exporter:
                startups.append(exporter.startup_seconds)
                for _ in range(5):
                    first: Answer = exporter.get("/metrics")
                    assert first.status == 200
                wait_for(lambda: exporter.get("/api/v1/cycle").status == 200)
                memory = max(memory, exporter.memory_bytes() / 2**20)
    print(f"\neight ranks: ready after {min(startups):.2f} s (best of 3), {memory:.1f} MiB resident")
    # The aims are 1 s and 60 MB; a machine that does other work gets some room for the first.
    assert min(startups) < 3
    assert memory < 64
