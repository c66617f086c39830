"""The command ``eagle-exporter``: one module per subcommand.

Each module has ``add_parser(subparsers)``, which adds a parser named like the module, and
``run(args) -> int``, which returns the exit code. Only the module of the command that is called is imported,
so that ``serve`` never waits for what ``top`` needs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING

from eagle_exporter import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = ("serve", "launch", "demo", "top", "doctor", "advise", "assets", "off", "on", "profile")
"""Modules of this package, in the order in which ``--help`` shows them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program name; ``sys.argv[1:]`` when None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = arguments[:1]
    chosen = named if named and named[0] in COMMANDS else COMMANDS
    parser = argparse.ArgumentParser(
        prog="eagle-exporter",
        description="Prometheus exporter for speculative decoding in SGLang.",
    )
    parser.add_argument("--version", action="version", version=f"eagle-exporter {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in chosen}
    for module in modules.values():
        module.add_parser(subparsers)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = getattr(modules[args.command], "UNRECOGNIZED_HINT", "")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"\n{hint}" if hint else ""))
    try:
        return int(modules[args.command].run(args))
    except BrokenPipeError:
        # Whoever read our output (head, less) has seen enough. Without this, Python complains once more at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
