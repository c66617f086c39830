from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from eagle_exporter.settings import DEFAULT_PORT
from tests.deploy.commands import venv_program
from tests.tools import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def final_stage() -> str:
    """Return the stage that becomes the image."""
    return DOCKERFILE.read_text().rpartition("\nFROM ")[2]


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([venv_program("hadolint"), DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_say_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text().replace("# hadolint ignore", "# nothing"))
    assert subprocess.run([venv_program("hadolint"), bad], capture_output=True).returncode != 0


def test_it_runs_as_a_numbered_user_that_is_not_root() -> None:
    assert re.search(r"^USER 10077:10077$", final_stage(), re.MULTILINE)


def test_the_port_is_that_of_the_exporter() -> None:
    assert f"EXPOSE {DEFAULT_PORT}\n" in final_stage()
    assert f"127.0.0.1:{DEFAULT_PORT}/-/healthy" in final_stage()


def test_no_build_tool_is_left_in_the_image() -> None:
    assert "pip" not in final_stage()
    assert "COPY . " not in final_stage()


@pytest.mark.parametrize("name", ["eagle_exporter", "deploy", "grafana", "pyproject.toml", "README.md", "LICENSE"])
def test_the_context_has_what_the_build_reads(name: str) -> None:
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert f"!{name}" in ignored
    assert (ROOT / name).exists()
