from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from eagle_exporter import control
from eagle_exporter.control import MAX_BYTES, Control


def test_nothing_has_changed_in_a_new_file(tmp_path: Path) -> None:
    assert Control(tmp_path).changed() is None


def test_a_command_is_seen_once(tmp_path: Path) -> None:
    hooks = Control(tmp_path)
    control.write(tmp_path, ["off"])
    assert hooks.changed() == ["off"]
    assert hooks.changed() is None
    control.write(tmp_path, ["on", "profile 5"])
    assert hooks.changed() == ["on", "profile 5"]
    assert hooks.changed() is None


def test_the_same_command_again_is_a_new_command(tmp_path: Path) -> None:
    """After "on", a fuse may have blown: a second "on" must reset it."""
    hooks = Control(tmp_path)
    control.write(tmp_path, ["on"])
    assert hooks.changed() == ["on"]
    control.write(tmp_path, ["on"])
    assert hooks.changed() == ["on"]


def test_a_shorter_command_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    hooks = Control(tmp_path)
    control.write(tmp_path, ["profile 123456", "on"])
    control.write(tmp_path, ["off"])
    assert hooks.changed() == ["off"]


def test_a_file_written_by_hand_works_too(tmp_path: Path) -> None:
    hooks = Control(tmp_path)
    (tmp_path / "control").write_text("# maintenance\n\n  off  ")
    assert hooks.changed() == ["off"]


def test_bytes_that_are_no_text_are_no_error(tmp_path: Path) -> None:
    hooks = Control(tmp_path)
    (tmp_path / "control").write_bytes(b"\xff\x00off\n")
    commands = hooks.changed()
    assert commands is not None
    assert "off" not in commands


def test_a_file_that_was_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("off\n")
    assert Control(tmp_path).changed() == ["off"]


def test_only_the_owner_may_write(tmp_path: Path) -> None:
    Control(tmp_path)
    assert stat.S_IMODE((tmp_path / "control").stat().st_mode) & 0o137 == 0


def test_commands_to_a_server_that_is_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        control.write(tmp_path, ["off"])
    assert list(tmp_path.iterdir()) == []


def test_too_long_commands_are_refused(tmp_path: Path) -> None:
    hooks = Control(tmp_path)
    with pytest.raises(ValueError, match="longer"):
        control.write(tmp_path, ["x" * MAX_BYTES])
    assert hooks.changed() is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "control").symlink_to(victim)
    with pytest.raises(OSError, match="control"):
        Control(tmp_path)
    with pytest.raises(OSError, match="control"):
        control.write(tmp_path, ["off"])
    assert victim.read_text() == "precious"


def test_a_pipe_in_its_place_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "control")
    with pytest.raises(OSError, match="not a regular file"):
        Control(tmp_path)


def test_a_file_that_was_removed_changes_nothing(tmp_path: Path) -> None:
    hooks = Control(tmp_path)
    (tmp_path / "control").unlink()
    assert hooks.changed() is None
    hooks.close()
