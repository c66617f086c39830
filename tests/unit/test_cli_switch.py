"""``eagle-exporter off`` and ``on``: which servers take commands, and what is said of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eagle_exporter import cli, settings
from eagle_exporter.control import Control
from eagle_exporter.demo.replay import Replay
from eagle_exporter.registry.writer import server_directory
from tests.ranks import RankProcess, write_ended

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[None]:
    """A replay that runs."""
    with Replay(tmp_path, speed=0):
        yield


@pytest.mark.parametrize("command", ["off", "on"])
def test_the_hooks_of_every_server_are_told(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("a:30000", "b:30000")
    hooks = [Control(server_directory(tmp_path, name)) for name in names]
    with RankProcess(tmp_path, *({"server": name} for name in names)):
        assert cli.main([command, "--dir", str(tmp_path)]) == 0
        assert [one.changed() for one in hooks] == [[command], [command]]
        assert cli.main([command, "--dir", str(tmp_path), "--server", "b:30000"]) == 0
        assert [one.changed() for one in hooks] == [None, [command]]
    output = capsys.readouterr()
    assert [line.partition(f": {command};")[0] for line in output.out.splitlines()] == [*names, "b:30000"]
    assert output.err == ""


@pytest.mark.parametrize("command", ["off", "on"])
def test_a_server_that_has_ended_is_named_and_not_switched(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, running = (Control(server_directory(tmp_path, name)) for name in ("ended", "running"))
    write_ended(tmp_path, {"server": "ended"})
    with RankProcess(tmp_path, {"server": "running"}):
        assert cli.main([command, "--dir", str(tmp_path)]) == 0
    assert (ended.changed(), running.changed()) == (None, [command])
    output = capsys.readouterr()
    assert "ended" not in output.out
    assert output.err.splitlines() == [f"eagle-exporter {command}: ended, left alone: ended"]


def test_where_every_server_has_ended_none_is_told_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = Control(server_directory(tmp_path, "gone"))
    write_ended(tmp_path, {"server": "gone"})
    assert cli.main(["off", "--dir", str(tmp_path)]) == 1
    assert f"no server runs under {tmp_path}" in capsys.readouterr().err
    assert cli.main(["off", "--dir", str(tmp_path), "--server", "gone"]) == 1
    output = capsys.readouterr()
    assert output.err.splitlines() == [f"eagle-exporter off: no server 'gone' runs under {tmp_path}; it has ended"]
    assert output.out == ""
    assert hooks.changed() is None


def test_a_replay_that_runs_is_not_taken_for_nothing_beside_a_server_that_has_ended(
    tmp_path: Path, replayed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = Control(server_directory(tmp_path, "demo"))
    write_ended(tmp_path, {"server": "demo"})
    assert cli.main(["off", "--dir", str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "ended, left alone: demo" in first
    assert "replay: a replay of recorded cycles" in second
    assert hooks.changed() is None


def test_where_no_server_is_another_registry_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["off", "--dir", str(tmp_path)]) == 1
    assert f"no server under {tmp_path}; --dir or EAGLE_EXPORTER_DIR" in capsys.readouterr().err


def test_a_replay_cannot_be_switched_and_says_why(
    tmp_path: Path, replayed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for chosen in ([], ["--server", "replay"]):
        assert cli.main(["off", "--dir", str(tmp_path), *chosen]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "replay: a replay of recorded cycles; there is no SGLang" in line
    assert cli.main(["off", "--dir", str(tmp_path), "--server", "other"]) == 1
    assert "no server 'other'" in capsys.readouterr().err


def test_beside_a_replay_the_real_server_is_told_and_the_replay_named(
    tmp_path: Path, replayed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = Control(server_directory(tmp_path, "real"))
    with RankProcess(tmp_path, {"server": "real"}):
        assert cli.main(["off", "--dir", str(tmp_path)]) == 0
    assert hooks.changed() == ["off"]
    output = capsys.readouterr()
    assert output.out.startswith("real: off;")
    assert "replay: a replay of recorded cycles" in output.err


def test_ranks_without_a_control_file_are_sent_to_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RankProcess(tmp_path, {"server": "node-a:30000"}):
        assert cli.main(["off", "--dir", str(tmp_path)]) == 2
    assert "node-a:30000: no control file" in capsys.readouterr().err


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(f"{settings.PREFIX}DIR", "relative")
    assert cli.main(["off"]) == 2
    assert "EAGLE_EXPORTER_DIR" in capsys.readouterr().err
