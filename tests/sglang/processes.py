"""Finding and ending the processes of one server."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def of_server(registry: Path) -> dict[str, list[int]]:
    """Return the pids of the servers that write into this registry root, by role.

    Roles: ``main``, ``scheduler``, ``detokenizer``, ``exporter``; others (resource trackers) are left out. Schedulers
    and detokenizers are told by their parent: a process that changed its title has written over its environment.
    """
    wanted = f"EAGLE_EXPORTER_DIR={registry}".encode()
    commands: dict[int, str] = {}
    parents: dict[int, int] = {}
    named: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            commands[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z":
            commands.pop(pid)
            continue
        parents[pid] = int(parent)
        if wanted in environment:
            named.add(pid)
    main = [pid for pid in named if "-m sglang.launch_server" in commands[pid] and "supervisor" not in commands[pid]]

    def children(title: str) -> list[int]:
        return [pid for pid, command in commands.items() if title in command and parents[pid] in main]

    return {
        "main": main,
        "scheduler": children("sglang::scheduler"),
        "detokenizer": children("sglang::detokenizer"),
        "exporter": [pid for pid in named if "eagle_exporter serve" in commands[pid]],
    }


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
