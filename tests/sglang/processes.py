"""Finding and ending the processes of one server."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def of_server(registry: Path) -> dict[str, list[int]]:
    """Return the pids of the processes whose environment names this registry root, by role.

    Roles: ``main``, ``scheduler``, ``detokenizer``, ``exporter``; others (resource trackers) are left out.
    """
    wanted = f"EAGLE_EXPORTER_DIR={registry}".encode()
    roles: dict[str, list[int]] = {"main": [], "scheduler": [], "detokenizer": [], "exporter": []}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        # A process that changed its title has written over part of its environment.
        if wanted not in environment and str(registry) not in command:
            continue
        if "eagle_exporter serve" in command:
            roles["exporter"].append(int(entry.name))
        elif "sglang::scheduler" in command:
            roles["scheduler"].append(int(entry.name))
        elif "sglang::detokenizer" in command:
            roles["detokenizer"].append(int(entry.name))
        elif "sglang.launch_server" in command and "supervisor" not in command:
            roles["main"].append(int(entry.name))
    return roles


def kill(pid: int) -> None:
    """SIGKILL, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def exists(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
