"""The real wheels of SGLang, in the cache, read as they are."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from functools import lru_cache
from pathlib import Path

from eagle_exporter.hooks.source import Source
from tests.tools import ROOT

PINS = ROOT / ".ci" / "requirements" / "sglang-wheels.txt"
VERSIONS = tuple(
    line.split()[0].partition("==")[2] for line in PINS.read_text().splitlines() if line and not line.startswith("#")
)
"""Oldest first."""

PREPARE = (sys.executable, str(ROOT / ".ci" / "environment.py"), "wheels")


@lru_cache
def wheels() -> dict[str, Path]:
    """Return the wheel of every version; what is missing in the cache is downloaded.

    Raises:
        FileNotFoundError: It cannot be had; the message says why. A test never skips for a missing wheel.
    """
    found = _known()
    if missing := [version for version in VERSIONS if version not in found]:
        done = subprocess.run(PREPARE, capture_output=True, text=True, cwd=ROOT)
        found = _known()
        if missing := [version for version in missing if version not in found]:
            said = (done.stdout + done.stderr)[-2000:]
            raise FileNotFoundError(
                f"no wheels of SGLang {', '.join(missing)}; run: python3 .ci/environment.py wheels\n{said}"
            )
    return found


def _known() -> dict[str, Path]:
    try:
        paths = json.loads((ROOT / ".venvs" / "paths.json").read_text()).get("wheels", {})
    except (OSError, ValueError):
        return {}
    return {version: Path(path) for version, path in paths.items() if Path(path).is_file()}


def source(version: str) -> Source:
    """Return the source of a version."""
    archive = zipfile.ZipFile(wheels()[version])
    names = set(archive.namelist())
    return Source(lambda path: archive.read(path) if path in names else None, directory=str(wheels()[version]))


def released(version: str) -> str:
    """Return the day on which the wheel was built, as ``2026-10-30``: that of its metadata."""
    with zipfile.ZipFile(wheels()[version]) as archive:
        year, month, day = archive.getinfo(f"sglang-{version}.dist-info/METADATA").date_time[:3]
    return f"{year}-{month:02}-{day:02}"
