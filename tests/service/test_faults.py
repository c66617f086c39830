"""Files that break under the exporter's eyes, connections that want to hold it up, and other users."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import socket
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.folders import open_folder
from tests.ranks import RankProcess, write_ended
from tests.service.exporter import Exporter
from tests.tools import soak
from tests.users import NOBODY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CORRUPTIONS = 2000 if soak() else 100
IDLE_CONNECTIONS = 10_000 if soak() else 1500
SLOW_CONNECTIONS = 1000 if soak() else 200


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


def zero(path: Path, chance: random.Random) -> None:
    size = path.stat().st_size
    start = chance.randrange(size)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(chance.randrange(size - start + 1)))


def flip_bits(path: Path, chance: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(chance.randint(1, 40)):
            # Half of the flips hit the header and the JSON, where they hurt.
            file.seek(chance.choice((chance.randrange(min(size, 4096)), chance.randrange(size))))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def replace(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.write_bytes(chance.randbytes(chance.randrange(5000)))


def forbid(path: Path, chance: random.Random) -> None:
    path.chmod(0)


def make_directory(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to(chance.choice(("/dev/zero", "/etc/passwd", str(path), "../../..")))


FAULTS = (truncate, zero, flip_bits, replace, forbid, make_directory, make_pipe, make_link)


def test_no_broken_file_breaks_the_page_and_the_others_stay_on_it(open_path: Path) -> None:
    chance = random.Random(6)
    registry, templates = open_path / "registry", open_path / "templates"
    write_ended(templates, *({"server": "broken:1", "tp_rank": rank, "tiers": [3]} for rank in range(4)))
    sound = sorted(templates.glob("*/*.bin"))
    skipped_in_all = dict.fromkeys((fault.__name__ for fault in FAULTS), 0)
    as_nobody = os.geteuid() == 0
    registry.mkdir()
    broken = registry / "broken"
    broken.mkdir(mode=0o755)
    with (
        _group(NOBODY if as_nobody else None),
        RankProcess(registry, {"server": "sound:1"}) as process,
        # Root may read anything; a file without permissions needs another user.
        Exporter(registry, user=NOBODY if as_nobody else None) as exporter,
    ):
        process.cycles(3)
        for number in range(CORRUPTIONS):
            path = broken / chance.choice(sound).name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif path.exists() or path.is_symlink():
                path.unlink()
            shutil.copyfile(chance.choice(sound), path)
            path.chmod(0o644)
            fault = chance.choice(FAULTS)
            fault(path, chance)
            page = exporter.get("/metrics")
            assert page.status == 200, page.text
            families = {family.name: family for family in text_string_to_metric_families(page.text)}
            assert "eagle_cycles" in families, page.text
            cycles = {s.labels["server"]: s.value for s in families["eagle_cycles"].samples}
            assert cycles["sound:1"] == 3, (number, fault)
            skipped_in_all[fault.__name__] += sum(s.value for s in families["eagle_registry_files_skipped"].samples) > 0
            if number % 10 == 0:
                assert exporter.get("/api/v1/cycle").status == 200, (number, fault, exporter.log())
        assert exporter.process.poll() is None
        assert "Traceback" not in exporter.log()
    print(f"\n{CORRUPTIONS} faults; pages with skipped files after each kind: {skipped_in_all}")
    for fault in (forbid, make_directory, make_pipe, make_link, replace):
        assert skipped_in_all[fault.__name__] > 0 or (fault is forbid and os.geteuid() == 0 and not as_nobody)


def test_another_user_in_the_group_sees_who_lives_and_changes_nothing(open_path: Path) -> None:
    as_nobody = os.geteuid() == 0
    registry = open_path / "registry"
    with (
        _group(NOBODY if as_nobody else None),
        RankProcess(registry) as process,
        Exporter(registry, user=NOBODY if as_nobody else None) as exporter,
    ):
        process.cycles(3)
        before = _tree(registry)
        assert "eagle_rank_up{" in exporter.get("/metrics").text
        assert _value(exporter, "eagle_rank_up") == 1
        process.kill()
        assert _value(exporter, "eagle_rank_up") == 0
        assert _value(exporter, "eagle_cycles_total") == 3
        assert _tree(registry) == before


def test_idle_and_slow_connections_do_not_stop_a_scrape(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    connections: list[socket.socket] = []
    slowest = 0.0
    with RankProcess(tmp_path / "registry"), Exporter(tmp_path / "registry") as exporter:
        try:
            for number in range(IDLE_CONNECTIONS + SLOW_CONNECTIONS):
                connection = socket.create_connection(("127.0.0.1", exporter.port), 5)
                connections.append(connection)
                if number % (IDLE_CONNECTIONS // SLOW_CONNECTIONS) == 0:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nX: ")
                if number % 250 == 0:
                    started = time.monotonic()
                    assert exporter.get("/metrics").status == 200
                    slowest = max(slowest, time.monotonic() - started)
            # Slow ones go on sending, a byte at a time.
            for _ in range(5):
                for connection in connections[:: IDLE_CONNECTIONS // SLOW_CONNECTIONS]:
                    with contextlib.suppress(OSError):
                        connection.send(b"x")
                started = time.monotonic()
                assert exporter.get("/metrics").status == 200
                assert exporter.get("/-/healthy").status == 200
                slowest = max(slowest, time.monotonic() - started)
            descriptors = len(os.listdir(f"/proc/{exporter.process.pid}/fd"))
            memory = exporter.memory_bytes() / 2**20
        finally:
            for connection in connections:
                connection.close()
        print(
            f"\n{len(connections)} connections: slowest scrape {slowest:.2f} s, exporter keeps {descriptors} "
            f"descriptors and {memory:.0f} MiB"
        )
        assert slowest < 3
        assert descriptors < 700
        assert memory < 120


def test_a_connection_that_never_finishes_its_request_is_closed(tmp_path: Path) -> None:
    with (
        Exporter(tmp_path) as exporter,
        socket.create_connection(("127.0.0.1", exporter.port), 5) as idle,
        socket.create_connection(("127.0.0.1", exporter.port), 5) as slow,
    ):
        end = time.monotonic() + 20
        closed: set[socket.socket] = set()
        while len(closed) < 2 and time.monotonic() < end:
            with contextlib.suppress(OSError):
                slow.send(b"G")
            for connection in (idle, slow):
                connection.settimeout(0.2)
                try:
                    if connection.recv(100) == b"":
                        closed.add(connection)
                except TimeoutError:
                    continue
                except OSError:
                    closed.add(connection)
        assert len(closed) == 2


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n", b"413"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
    ],
)
def test_what_is_too_large_or_no_http_gets_a_short_error(tmp_path: Path, request_bytes: bytes, status: bytes) -> None:
    with (
        Exporter(tmp_path) as exporter,
        socket.create_connection(("127.0.0.1", exporter.port), 5) as connection,
    ):
        with contextlib.suppress(OSError):
            connection.sendall(request_bytes)
        answer = b""
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                answer += data
        assert answer.split(b" ", 2)[1:2] == [status] or answer == b""
        assert answer or len(request_bytes) > 100_000
        if answer:
            assert b"content-type: text/plain; charset=utf-8" in answer.lower()
        assert exporter.get("/-/healthy").status == 200


def _value(exporter: Exporter, name: str) -> float:
    families = text_string_to_metric_families(exporter.get(f"/metrics?name[]={name}").text)
    (sample,) = (sample for family in families for sample in family.samples)
    return float(sample.value)


def _tree(root: Path) -> list[tuple[str, int, int, int]]:
    return sorted((str(path), path.stat().st_mode, path.stat().st_size, path.stat().st_ino) for path in root.rglob("*"))


@pytest.fixture
def open_path() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@contextlib.contextmanager
def _group(number: int | None) -> Iterator[None]:
    if number is None:
        yield
        return
    os.environ["EAGLE_EXPORTER_GROUP"] = str(number)
    try:
        yield
    finally:
        del os.environ["EAGLE_EXPORTER_GROUP"]
