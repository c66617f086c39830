"""The real SGLang on the CPU. One server runs at a time; each is started once and serves many tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import soak

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
