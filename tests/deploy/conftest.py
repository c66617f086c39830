"""The deployment files as a user gets them: written by ``eagle-exporter assets``."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_exporter.cli import assets


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that ``eagle-exporter assets`` writes."""
    out = tmp_path_factory.mktemp("assets")
    assets.write(out, list(assets.GROUPS))
    return out
