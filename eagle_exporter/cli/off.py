"""``eagle-exporter off``: running servers' hooks pass everything through, until ``on`` or a restart."""

from __future__ import annotations

import argparse
from typing import Any

from eagle_exporter.cli import switch


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "off",
        help="make the hooks of running servers pass-through: no timing, no counting, until on or a restart",
        description=__doc__,
    )
    switch.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return switch.switch(args, "off")
