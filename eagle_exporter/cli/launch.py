"""``eagle-exporter launch``: SGLang's server with the hooks, for SGLang without a plugin system."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

SERVER_MODULE = "eagle_exporter.hooks.launch"
EXAMPLE = "eagle-exporter launch -- --model-path TARGET --speculative-algorithm EAGLE3 ..."
UNRECOGNIZED_HINT = f"SGLang's own arguments come after --, as in: {EXAMPLE}"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser(
        "launch",
        usage="eagle-exporter launch [-h] -- ARGUMENT ...",
        help="start SGLang's server with the hooks, where SGLang loads no plugins (before 0.5.11)",
        description="Run python -m sglang.launch_server with the hooks, for SGLang before 0.5.11, which loads no "
        "plugins. It becomes SGLang's own process: output, signals and exit code are SGLang's. With newer releases it "
        "does the same as SGLang's own command.",
        epilog=f"Put -- before SGLang's arguments: {EXAMPLE}",
    )
    parser.add_argument(
        "arguments",
        metavar="ARGUMENT",
        nargs=argparse.REMAINDER,
        help="of sglang.launch_server, unchanged; what they are: eagle-exporter launch -- --help",
    )


def run(args: argparse.Namespace) -> int:
    """Become SGLang's server.

    Returns:
        Only when that is not possible: 1 without SGLang, 2 for wrong arguments.
    """
    if args.arguments[:1] != ["--"]:
        print(f"eagle-exporter launch: {UNRECOGNIZED_HINT}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("sglang") is None:
        print(
            f"eagle-exporter launch: SGLang is not installed for {sys.executable}; install the exporter with the "
            "Python that runs SGLang, and use the eagle-exporter beside that Python",
            file=sys.stderr,
        )
        return 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The process itself: nobody in between who would have to pass on signals and the exit code.
    return os.execv(sys.executable, [sys.executable, "-m", SERVER_MODULE, *args.arguments[1:]])  # noqa: S606
