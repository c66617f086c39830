"""A registry that SGLang's user may not use: SGLang serves, says so once, and `doctor` says the same.

Root passes every permission check, so SGLang runs as an ordinary user here (see `tests.users`): the directories are
real, and the refusals are the kernel's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import free_port
from tests.service.exporter import answers as is_listening
from tests.sglang.measured import TOGETHER, Configuration, send_together, start
from tests.users import NOBODY, SOMEBODY_ELSE, program_as

AS_ROOT = os.geteuid() == 0


def read_only(root: Path) -> tuple[Path, str]:
    """Make a root in which this user may create nothing."""
    root.mkdir(mode=0o555)
    root.chmod(0o555)
    return root, "tested"


def of_somebody_else(root: Path) -> tuple[Path, str]:
    """Make the server's directory one of another user, who lets everybody write.

    Only root can give a directory away; without it there is a directory of another user at hand, but not writable.
    """
    if not AS_ROOT:
        return Path("/"), "usr"
    directory = root / "tested"
    directory.mkdir(parents=True)
    os.chown(directory, SOMEBODY_ELSE, SOMEBODY_ELSE)
    directory.chmod(0o777)
    return root, "tested"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (read_only, ("cannot create the registry directory", "Permission denied", "EAGLE_EXPORTER_DIR")),
        (
            of_somebody_else,
            (
                f"belongs to uid {SOMEBODY_ELSE if AS_ROOT else 0}",
                "remove it" if AS_ROOT else "denied",
                "EAGLE_EXPORTER_DIR",
                "EAGLE_EXPORTER_SERVER",
            ),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_registry_of_others_costs_the_metrics_and_nothing_else(
    models: Path, sglang_python: str, tmp_path: Path, make: Callable[[Path], tuple[Path, str]], words: tuple[str, ...]
) -> None:
    root, name = make(tmp_path / "registry")
    before = _listing(root, name)
    home = tmp_path / "home"
    home.mkdir()
    if AS_ROOT:
        os.chown(home, NOBODY, NOBODY)
    port = free_port()
    environment = {
        "EAGLE_EXPORTER_DIR": str(root),
        "EAGLE_EXPORTER_SERVER": name,
        "EAGLE_EXPORTER_EMBED": "1",
        "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{port}",
        "HOME": str(home),
        "TMPDIR": str(home),
    }
    python = program_as(NOBODY, sglang_python, tmp_path)
    with start(models, python, Configuration(), tmp_path, environment=environment) as server:
        served = [answer["output_ids"] for answer in send_together(server)]
        assert served == [answers.expected_tokens(prompt, count) for prompt, count in TOGETHER]
        assert server.is_running()
        assert not is_listening(port), "there is nothing to export"
        told = subprocess.run(
            [python, "-m", "eagle_exporter", "doctor", "--json"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        log = server.log()
    (line,) = [line for line in log.splitlines() if "eagle-exporter:" in line]
    assert "hooks stay off" in line
    assert [word for word in words if word not in line] == []
    # SGLang has tracebacks of its own, when it asks itself for something before it listens.
    assert re.findall(r'File ".*/eagle_exporter/(?:hooks|registry)/.*', log) == []
    assert told.returncode == 2, told.stdout + told.stderr
    (finding,) = [each for each in json.loads(told.stdout)["findings"] if each["status"] == "broken"]
    assert finding["check"] == "registry"
    who, _, what = finding["text"].partition(": ")
    assert str(NOBODY if AS_ROOT else os.geteuid()) in who
    assert what in line, "log and doctor say the same"
    assert _listing(root, name) == before


def _listing(root: Path, name: str) -> list[str]:
    directory = root / name
    return sorted(os.listdir(root)) + (sorted(os.listdir(directory)) if directory.is_dir() else [])
