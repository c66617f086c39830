"""What ``eagle-exporter off`` and ``on`` share: telling the hooks of running servers to stop or go on."""

from __future__ import annotations

import argparse
import sys
import urllib.parse
from pathlib import Path

from eagle_exporter import control, settings
from eagle_exporter.registry.layout import CONTROL_FILE, FILE_SUFFIX, directory_name
from eagle_exporter.registry.reader import RegistryReader
from eagle_exporter.registry.writer import is_held

REPLAY = "replay:"
"""How the model name of a replay begins (``eagle-exporter demo --replay``)."""
REPLAYED = "a replay of recorded cycles; there is no SGLang and no hook behind it that takes commands"
WITHOUT_CONTROL = "no control file, so no hooks take commands; 'eagle-exporter doctor' says what is attached"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    parser.add_argument(
        "--dir", type=Path, help="registry root (default: EAGLE_EXPORTER_DIR or /dev/shm/eagle-exporter)"
    )
    parser.set_defaults(dir=None)
    parser.add_argument("--server", help="only this server (default: every one that runs)")


def switch(args: argparse.Namespace, command: str) -> int:
    """Write a command into the control files of the chosen servers that run, and name the others.

    Returns:
        0 when every chosen server that runs has it (a replay aside, which has no hooks); 1 when none runs; 2 when one
        could not be told or has no hooks.
    """
    try:
        root = args.dir or settings.read(strict=True).directory
    except settings.SettingError as error:
        print(f"eagle-exporter {command}: {error}", file=sys.stderr)
        return 2

    def say(text: str) -> None:
        print(f"eagle-exporter {command}: {text}", file=sys.stderr)

    directories = servers(root, args.server)
    running = [directory for directory in directories if is_running(directory)]
    ended = [_name(directory) for directory in directories if directory not in running]
    hookless = hookless_servers(root, args.server)
    if ended and (running or hookless or args.server is None):
        say(f"ended, left alone: {', '.join(ended)}")
    if not running:
        if not hookless:
            what = f"server {args.server!r}" if args.server else "server"
            if ended:
                say(f"no {what} runs under {root}" + ("; it has ended" if args.server else ""))
            else:
                say(f"no {what} under {root}; --dir or EAGLE_EXPORTER_DIR names another registry")
            return 1
        for text in hookless.values():
            say(text)
        return 2
    failed = False
    for directory in running:
        try:
            control.write(directory, [command])
        except OSError as error:
            failed = True
            say(f"{directory / CONTROL_FILE}: {error.strerror}; only the user who runs the server may switch it")
            continue
        print(f"{_name(directory)}: {command}; eagle_timing_enabled shows it once the server has read it")
    for text in hookless.values():
        say(text)
    return 2 if failed or WITHOUT_CONTROL in hookless else 0


def _name(directory: Path) -> str:
    """Return the name of the server whose directory it is, as ``--server`` takes it."""
    return urllib.parse.unquote(directory.name)


def is_running(directory: Path) -> bool:
    """Return whether a rank of a server runs: it holds its file. One that cannot be looked at may."""
    try:
        return any(is_held(path) for path in directory.iterdir() if path.suffix == FILE_SUFFIX)
    except OSError:
        return True


def without_hooks(root: Path, name: str | None) -> str:
    """Return why servers that run take no commands; "" when none of that name does."""
    return "; ".join(hookless_servers(root, name).values())


def hookless_servers(root: Path, name: str | None) -> dict[str, str]:
    """Return why servers that run take no commands: `REPLAYED` or `WITHOUT_CONTROL` -> a sentence that names them.

    Args:
        root: The registry root.
        name: Only this server, None for every one.
    """
    try:
        ranks = RegistryReader(root).read().ranks
    except OSError:
        return {}
    found: dict[str, set[str]] = {}
    for rank in ranks:
        server = rank.labels["server"]
        if rank.alive and name in (None, server) and not (rank.path.parent / CONTROL_FILE).is_file():
            why = REPLAYED if rank.labels["model_name"].startswith(REPLAY) else WITHOUT_CONTROL
            found.setdefault(why, set()).add(server)
    return {why: f"{', '.join(sorted(found[why]))}: {why}" for why in (REPLAYED, WITHOUT_CONTROL) if why in found}


def servers(root: Path, name: str | None) -> list[Path]:
    """Return the directories of the servers that have or had hooks: those with a control file."""
    if name is not None:
        candidates = [root / directory_name(name)]
    else:
        try:
            candidates = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError:
            return []
    return [path for path in candidates if (path / CONTROL_FILE).is_file()]
