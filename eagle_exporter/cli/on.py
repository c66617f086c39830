"""``eagle-exporter on``: let the hooks of running servers measure again, also after a blown fuse."""

from __future__ import annotations

import argparse
from typing import Any

from eagle_exporter.cli import switch


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "on",
        help="let the hooks of running servers measure again, also after a blown fuse",
        description=__doc__,
    )
    switch.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return switch.switch(args, "on")
