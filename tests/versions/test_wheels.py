"""A wheel that is not there is fetched, and one that cannot be had is an error that says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.versions import wheels


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    wheels.wheels.cache_clear()
    yield
    wheels.wheels.cache_clear()


def test_every_version_has_its_wheel() -> None:
    found = wheels.wheels()
    assert set(found) >= set(wheels.VERSIONS)
    assert all(found[version].name.startswith(f"sglang-{version}-") for version in wheels.VERSIONS)
    assert wheels.source("0.5.6").text("sglang/srt/server_args.py")
    assert wheels.source("0.5.6").text("sglang/srt/no_such_file.py") is None


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch, prepare: str) -> None:
    """Have nothing there, and a script in place of the one that prepares it."""
    script = folder / "prepare.py"
    script.write_text(prepare)
    (folder / ".venvs").mkdir()
    monkeypatch.setattr(wheels, "ROOT", folder)
    monkeypatch.setattr(wheels, "PREPARE", (sys.executable, str(script)))


def test_what_is_missing_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "sglang.whl"
    paths = json.dumps({"wheels": dict.fromkeys(wheels.VERSIONS, str(made))})
    prepare = f"open({str(made)!r}, 'w')\nopen('.venvs/paths.json', 'w').write({paths!r})\n"
    checkout(tmp_path, monkeypatch, prepare)
    assert wheels.wheels() == dict.fromkeys(wheels.VERSIONS, made)


def test_what_cannot_be_had_fails_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path, monkeypatch, "import sys; sys.exit('error: no network')")
    with pytest.raises(FileNotFoundError, match=r"no wheels of SGLang 0\.5\.6, .*environment\.py wheels") as raised:
        wheels.wheels()
    assert "error: no network" in str(raised.value)
