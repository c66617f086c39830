"""What tests of several folders share: the real SGLang's interpreter and the models that it serves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.sglang.measured import interpreter
from tests.tools import ROOT


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
