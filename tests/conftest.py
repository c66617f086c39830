"""What tests of several folders share: the real SGLang's interpreter and the models that it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

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


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each of the two workers of ``make test`` a group at a time: tests that share servers stay together.

    Not with ``--dist loadgroup``: pytest-xdist 3.8 writes the group into an attribute that pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


_ALONE = ("test_servers.py", "test_stays_away.py", "test_versions.py")
"""Files of `tests/sglang` that share nothing with the others, for whichever worker is free first."""


def group_of(nodeid: str) -> str:
    """Return the group of a test: its folder, in `tests/unit` its file."""
    _, folder, *rest = nodeid.partition("::")[0].split("/")
    return f"{folder}/{rest[0]}" if folder == "unit" or (folder == "sglang" and rest[0] in _ALONE) else folder


def turn_of(nodeid: str) -> int:
    """Return when a test's turn is: the longest group first, the other folders beside it, the small groups last."""
    group = group_of(nodeid)
    return 0 if group == "sglang" else 3 if group.startswith("unit/") else 2 if "/" in group else 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Schedule by groups."""
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the groups."""
    items.sort(key=lambda item: turn_of(item.nodeid))


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
