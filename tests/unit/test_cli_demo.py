"""``eagle-exporter demo`` with SGLang: what it leaves behind. A real SGLang runs it in tests/sglang."""

from __future__ import annotations

import argparse
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter.cli import demo
from eagle_exporter.control import Control
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.registry.writer import server_directory
from tests.ranks import RankProcess, write_ended


class Server:
    """In place of SGLang: a rank whose process holds its file, and the control file of its hooks."""

    url = "http://127.0.0.1:0"

    def __init__(self, _directory: Path, *, extra_env: dict[str, str], **_options: Any) -> None:
        self.root, self.name = Path(extra_env["EAGLE_EXPORTER_DIR"]), extra_env["EAGLE_EXPORTER_SERVER"]
        self.rank: RankProcess | None = None

    def launch(self) -> None:
        Control(server_directory(self.root, self.name)).close()
        self.rank = RankProcess(self.root, {"server": self.name})

    def wait_ready(self) -> None:
        pass

    def is_running(self) -> bool:
        return self.rank is not None

    def die(self) -> None:
        rank, self.rank = self.rank, None
        if rank is not None:
            rank.close()

    stop = die


class Pair:
    """In place of the models."""

    target = Path("/models/target")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Server, ExitStack]:
    """The demo's server, and what ends it."""
    monkeypatch.setenv("EAGLE_EXPORTER_DIR", str(tmp_path / "registry"))
    monkeypatch.setenv("EAGLE_EXPORTER_SERVER", "node-a:30000")
    monkeypatch.setattr(demo, "SGLangServer", Server)
    monkeypatch.setattr(demo, "build_pair", lambda _: Pair)
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    args = parser.parse_args(["demo", "--cache", str(tmp_path / "cache")])
    running = demo._SGLangDemo(args, threading.Event(), demo._Display())
    stack = ExitStack()
    assert running._start_sglang(stack)
    server = running._server
    assert isinstance(server, Server)
    return server, stack


def servers(server: Server) -> list[str]:
    return [rank.labels["server"] for rank in RegistryReader(server.root).read().ranks]


def test_a_demo_that_ends_in_order_leaves_nothing_of_its_server_and_what_others_left(
    started: tuple[Server, ExitStack],
) -> None:
    server, stack = started
    write_ended(server.root, {"server": "other"})
    assert servers(server) == ["node-a:30000", "other"]
    stack.close()
    assert servers(server) == ["other"]
    assert [path.name for path in server.root.iterdir()] == ["other"]


def test_a_demo_whose_server_has_died_leaves_its_files_to_be_seen(started: tuple[Server, ExitStack]) -> None:
    server, stack = started
    server.die()
    stack.close()
    assert servers(server) == ["node-a:30000"]
