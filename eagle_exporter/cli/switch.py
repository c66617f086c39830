"""What ``eagle-exporter off`` and ``on`` share: telling the hooks of running servers to stop or go on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eagle_exporter import control, settings
from eagle_exporter.registry.layout import CONTROL_FILE, directory_name


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
        0 when every chosen server has it, 1 when there is none, 2 when one could not be told.
    """
    try:
        root = args.dir or settings.read(strict=True).directory
    except settings.SettingError as error:
        print(f"eagle-exporter {command}: {error}", file=sys.stderr)
        return 2
    directories = servers(root, args.server)
    if not directories:
        wanted = f"server {args.server!r}" if args.server else "server"
        print(
            f"eagle-exporter {command}: no {wanted} under {root}; --dir or EAGLE_EXPORTER_DIR names another registry",
            file=sys.stderr,
        )
        return 1
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
