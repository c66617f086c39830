"""What ``eagle-exporter off`` and ``on`` share: telling the hooks of running servers to stop or go on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eagle_exporter import control, settings
from eagle_exporter.registry.layout import CONTROL_FILE, directory_name
from eagle_exporter.registry.reader import RegistryReader

REPLAY = "replay:"
"""How the model name of a replay begins (``eagle-exporter demo --replay``)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    parser.add_argument(
        "--dir", type=Path, help="registry root (default: EAGLE_EXPORTER_DIR or /dev/shm/eagle-exporter)"
    )
    parser.set_defaults(dir=None)
    parser.add_argument("--server", help="only this server (default: every server of the registry)")


def switch(args: argparse.Namespace, command: str) -> int:
    """Write a command into the control files of the chosen servers.

    Returns:
        0 when every chosen server has it, 1 when there is none, 2 when one could not be told or has no hooks.
    """
    try:
        root = args.dir or settings.read(strict=True).directory
    except settings.SettingError as error:
        print(f"eagle-exporter {command}: {error}", file=sys.stderr)
        return 2
    directories = servers(root, args.server)
    if not directories:
        hookless = without_hooks(root, args.server)
        wanted = f"server {args.server!r}" if args.server else "server"
        missing = f"no {wanted} under {root}; --dir or EAGLE_EXPORTER_DIR names another registry"
        print(f"eagle-exporter {command}: {hookless or missing}", file=sys.stderr)
        return 2 if hookless else 1
    failed = False
    for directory in directories:
        try:
            control.write(directory, [command])
        except OSError as error:
            failed = True
            print(
                f"eagle-exporter {command}: {directory / CONTROL_FILE}: {error.strerror}; "
                "only the user who runs the server may switch it",
                file=sys.stderr,
            )
            continue
        print(f"{directory.name}: {command}; eagle_timing_enabled shows it from the server's next cycle on")
    return 2 if failed else 0


def without_hooks(root: Path, name: str | None) -> str:
    """Return why servers that the registry does show take no commands; "" when it shows none of that name."""
    try:
        ranks = RegistryReader(root).read().ranks
    except OSError:
        return ""
    shown = {rank.labels["server"]: rank.labels["model_name"] for rank in ranks}
    chosen = {server: model for server, model in shown.items() if name in (None, server)}
    if not chosen:
        return ""
    names = ", ".join(sorted(chosen))
    if all(model.startswith(REPLAY) for model in chosen.values()):
        return f"{names}: a replay of recorded cycles; there is no SGLang and no hook behind it that takes commands"
    return f"{names}: no control file, so no hooks take commands; 'eagle-exporter doctor' says what is attached"


def servers(root: Path, name: str | None) -> list[Path]:
    """Return the directories of the servers that have hooks: those with a control file."""
    if name is not None:
        candidates = [root / directory_name(name)]
    else:
        try:
            candidates = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError:
            return []
    return [path for path in candidates if (path / CONTROL_FILE).is_file()]
