"""Writer and reader in containers of their own: a rank's liveness needs no pid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.service.exporter import ROOT, wait_for

CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--ipc", "--uts"]
"""Namespaces of its own for pids, users, mounts, IPC and host name, as two containers of one pod have."""

WRITER = """
import os, sys, time
from pathlib import Path
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.writer import RankWriter, server_directory
from tests.ranks import make_plan
directory = server_directory(Path(sys.argv[1]), "contained")
writer = RankWriter(directory / "tp0-pp0-dp0.bin", Layout(make_plan(tiers=(3,), clock="host")))
writer.commit()
print(os.getpid(), flush=True)
sys.stdin.read()
"""
READER = """
import sys
from pathlib import Path
from eagle_exporter.registry.reader import RegistryReader
print([rank.alive for rank in RegistryReader(Path(sys.argv[1])).read().ranks])
"""


def seen(registry: Path, container: list[str]) -> str:
    """Return what a reader in a container sees."""
    done = subprocess.run(
        [*container, sys.executable, "-c", READER, str(registry)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_rank_is_seen_alive_and_dead_across_containers(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    writer = subprocess.Popen(
        [*CONTAINER, "--kill-child", sys.executable, "-c", WRITER, str(registry)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline().strip() == "1", "the writer is not in a pid namespace of its own"
        assert seen(registry, []) == "[True]"
        assert seen(registry, CONTAINER) == "[True]"
    finally:
        writer.kill()
        writer.wait(10)
    wait_for(lambda: seen(registry, CONTAINER) == "[False]", 20, "the lock being free")
    assert seen(registry, []) == "[False]"
