"""What tests of several folders share: the real SGLang's interpreter and the models that it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.sglang.measured import interpreter
from tests.tools import ROOT

# The SDK that the dashboards are built with needs Python 3.11. The dashboards themselves are files and need nothing.
collect_ignore = (
    []
    if sys.version_info >= (3, 11)
    else ["dashboards/test_preview.py", "dashboards/test_queries.py", "unit/test_dashboards_build.py"]
)

# A busy machine is no failure.
hypothesis.settings.register_profile("any-machine", deadline=None)
hypothesis.settings.load_profile("any-machine")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the tests over the two workers of ``make test``.

    What shares a server stays together: a folder is one group, in `tests/unit` a file. The longest group, the real
    SGLang, comes first; one worker is busy with it while the other does the rest.
    """
    here = Path(__file__).parent
    for item in items:
        folder, *rest = item.path.relative_to(here).parts
        item.add_marker(pytest.mark.xdist_group(f"{folder}/{rest[0]}" if folder == "unit" else folder))
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] != "sglang")


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
