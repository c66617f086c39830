"""Finding the programs that tests run beside the exporter: Prometheus, promtool, Chromium and the like."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def soak() -> bool:
    """Return whether the full sizes are asked for (``make soak``)."""
    return os.environ.get("EAGLE_EXPORTER_SOAK") == "1"


def find_tool(name: str) -> Path:
    """Return the path of a program.

    Args:
        name: Its name, for example ``promtool``.

    Raises:
        FileNotFoundError: It is nowhere; the message says how to get it. A test never skips for a missing
            program.
    """
    paths = ROOT / ".venvs" / "paths.json"
    if paths.is_file():
        known = json.loads(paths.read_text()).get(name)
        if known and Path(known).is_file():
            return Path(known)
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return beside
    cache = Path(os.environ.get("EAGLE_EXPORTER_CACHE") or "~/.cache/eagle-exporter").expanduser()
    for package in sorted(cache.glob("debian/*")):
        for candidate in (package / name, package / "root" / "usr" / "bin" / name):
            if candidate.is_file():
                return candidate
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; run: python3 .ci/environment.py {_group(name)}")
    return Path(found)


def _group(name: str) -> str:
    if name.startswith("systemd-"):
        return "systemd"
    return {"promtool": "prometheus", "amtool": "alertmanager", "kubectl": "dev"}.get(name, name)
