"""Folders that another user may enter; pytest's own are closed to others, again and again."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that everybody may enter and list, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="eagle-exporter-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
