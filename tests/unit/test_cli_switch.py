"""``eagle-exporter off`` and ``on``: which servers take commands, and what is said of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eagle_exporter import cli, settings
from eagle_exporter.control import Control
from eagle_exporter.demo.recording import DEFAULT_RECORDING, load
from eagle_exporter.demo.replay import ReplayServer
from eagle_exporter.registry.writer import server_directory
from tests.ranks import RankProcess

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("command", ["off", "on"])
def test_the_hooks_of_every_server_are_told(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = [Control(server_directory(tmp_path, name)) for name in ("a", "b")]
    assert cli.main([command, "--dir", str(tmp_path)]) == 0
    assert [one.changed() for one in hooks] == [[command], [command]]
    assert cli.main([command, "--dir", str(tmp_path), "--server", "b"]) == 0
    assert [one.changed() for one in hooks] == [None, [command]]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_where_no_server_is_another_registry_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["off", "--dir", str(tmp_path)]) == 1
    assert f"no server under {tmp_path}; --dir or EAGLE_EXPORTER_DIR" in capsys.readouterr().err


def test_a_replay_cannot_be_switched_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = ReplayServer(tmp_path, load(DEFAULT_RECORDING))
    try:
        for chosen in ([], ["--server", "replay"]):
            assert cli.main(["off", "--dir", str(tmp_path), *chosen]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "replay: a replay of recorded cycles; there is no SGLang" in line
        assert cli.main(["off", "--dir", str(tmp_path), "--server", "other"]) == 1
        assert "no server 'other'" in capsys.readouterr().err
    finally:
        replay.close()


def test_beside_a_replay_the_real_server_is_told(tmp_path: Path) -> None:
    replay = ReplayServer(tmp_path, load(DEFAULT_RECORDING))
    try:
        hooks = Control(server_directory(tmp_path, "real"))
        assert cli.main(["off", "--dir", str(tmp_path)]) == 0
        assert hooks.changed() == ["off"]
    finally:
        replay.close()


def test_ranks_without_a_control_file_are_sent_to_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RankProcess(tmp_path, {"server": "node-a:30000"}):
        assert cli.main(["off", "--dir", str(tmp_path)]) == 2
    assert "node-a:30000: no control file" in capsys.readouterr().err


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(f"{settings.PREFIX}DIR", "relative")
    assert cli.main(["off"]) == 2
    assert "EAGLE_EXPORTER_DIR" in capsys.readouterr().err
