"""``eagle-exporter serve``: the exporter process."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from eagle_exporter.settings import PREFIX, SettingError, read

DEFAULT_DIRECTORY = "/dev/shm/eagle-exporter"  # noqa: S108 - the shared registry, no temporary file


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve the metrics of all ranks over HTTP",
        description="Serve /metrics, a live page on / and the JSON behind it. Only reads the registry.",
        epilog="Defaults come from EAGLE_EXPORTER_DIR, EAGLE_EXPORTER_LISTEN and EAGLE_EXPORTER_LOG_LEVEL.",
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=Path,
        default=None,
        help=f"registry root (default: EAGLE_EXPORTER_DIR, else {DEFAULT_DIRECTORY})",
    )
    parser.add_argument(
        "--web.listen-address",
        dest="listen",
        metavar="ADDR",
        action="append",
        help="HOST:PORT, [IPV6]:PORT or :PORT, repeatable (default: EAGLE_EXPORTER_LISTEN or 0.0.0.0:10077)",
    )
    parser.add_argument(
        "--web.telemetry-path",
        dest="telemetry_path",
        metavar="PATH",
        default="/metrics",
        help="path of the metrics (default: /metrics)",
    )
    parser.add_argument(
        "--web.config.file",
        dest="web_config",
        metavar="FILE",
        type=Path,
        help="TLS, passwords and headers, in the Prometheus exporter-toolkit's format; re-read while running",
    )
    parser.add_argument(
        "--log.level",
        dest="log_level",
        choices=("debug", "info", "warn", "error"),
        default=None,
        help="default: EAGLE_EXPORTER_LOG_LEVEL, else info",
    )
    parser.add_argument(
        "--log.format",
        dest="log_format",
        choices=("logfmt", "json"),
        default="logfmt",
        help="default: logfmt",
    )
    # How the plugin in SGLang starts it; not for people.
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parent-fd", dest="parent_fd", type=int, default=None, help=argparse.SUPPRESS)


def registry_root(argument: Path | None) -> Path:
    """Return the registry root: the argument, else EAGLE_EXPORTER_DIR, else the default."""
    return argument or Path(os.environ.get("EAGLE_EXPORTER_DIR") or DEFAULT_DIRECTORY)


def _check_environment(args: argparse.Namespace) -> None:
    """Refuse a wrong variable, also one of the hooks: one environment usually serves both.

    An embedded exporter does not end for one: the plugin that started it has warned, and both use the default.

    Raises:
        SettingError: A variable that no argument overrides has a value that cannot be used.
    """
    overridden = {"DIR": args.dir, "LISTEN": args.listen, "LOG_LEVEL": args.log_level}
    without = {PREFIX + name for name, value in overridden.items() if value}
    read({name: value for name, value in os.environ.items() if name not in without}, strict=True)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or in embedded mode until the parent ends.

    Returns:
        0; 1 when an address is taken or cannot be had; 2 for a wrong setting.
    """
    # With these set, prometheus_client would take SGLang's multiprocess directory for its own on import.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    os.environ.pop("prometheus_multiproc_dir", None)
    from eagle_exporter.server import process

    try:
        if not args.embedded:
            _check_environment(args)
        settings = process.Settings(
            root=registry_root(args.dir),
            listen=tuple(args.listen or process.listen_from_environment(os.environ)),
            telemetry_path=args.telemetry_path,
            web_config=args.web_config,
            log_level=args.log_level or process.log_level_from_environment(os.environ),
            log_format=args.log_format,
            embedded=args.embedded,
            parent_fd=args.parent_fd,
        )
        settings.check()
    except (process.WrongSettingError, SettingError) as error:
        print(f"eagle-exporter serve: {error}", file=sys.stderr)
        return 2
    return process.serve(settings)
