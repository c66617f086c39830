"""The real SGLang on the CPU. One server runs at a time; each is started once and serves many tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.sglang.measured import interpreter
from tests.tools import soak

ROOT = Path(__file__).resolve().parents[2]

# Five servers for figures that are read rather than asserted: part of `make soak`.
collect_ignore = [] if soak() else ["test_prediction.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, so that ``-m "not sglang"`` leaves it out."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            # A server takes 20 s to start, and on a busy machine several times that.
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang and the exporter."""
    return interpreter()


@pytest.fixture(scope="session")
def models(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model pair with known answers."""
    directory = tmp_path_factory.mktemp("models") / "pair"
    code = (
        "import sys; from pathlib import Path; from eagle_exporter.demo.models import build_pair;"
        "build_pair(Path(sys.argv[1]))"
    )
    subprocess.run([sglang_python, "-c", code, str(directory)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return directory
