from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_root() -> Iterator[Path]:
    """An empty directory that every user reaches (pytest's own are for this user only)."""
    root = Path(tempfile.mkdtemp(prefix="eagle-test-"))
    root.chmod(0o755)
    yield root
    for directory, _, _ in os.walk(root):
        Path(directory).chmod(0o755)
    shutil.rmtree(root)
