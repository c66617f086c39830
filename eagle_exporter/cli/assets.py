"""``eagle-exporter assets``: the dashboards, rules and deployment files of this version, out of the package.

A wheel carries them in ``eagle_exporter/assets``; in a checkout they are beside the package. What is written has the
folders of the repository, so that the files find each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

import eagle_exporter

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = "deploy/prometheus/rules"
DASHBOARDS = "grafana/dashboards"
KUBERNETES = "deploy/kubernetes/base"


@dataclass(frozen=True)
class Group:
    """What one word of the command line stands for.

    Attributes:
        about: For ``--help``.
        sources: Files and folders, relative to the repository.
    """

    about: str
    sources: tuple[str, ...]


_RULES = (RULES, "deploy/prometheus/scrape.yml", "deploy/alertmanager", "deploy/runbooks")
_DASHBOARDS = (DASHBOARDS, "grafana/provisioning")
GROUPS: dict[str, Group] = {
    "dashboards": Group("Grafana dashboards and their provisioning", _DASHBOARDS),
    "rules": Group(
        "recording rules, alerts, runbooks, scrape and Alertmanager configurations",
        (*_RULES, "deploy/prometheus/scrape-file-sd.yml", "deploy/prometheus/scrape-kubernetes.yml"),
    ),
    "compose": Group(
        "docker compose: SGLang, exporter, Prometheus, Alertmanager, Grafana",
        ("deploy/compose", "deploy/Dockerfile", *_RULES, *_DASHBOARDS),
    ),
    "kubernetes": Group("kustomize base and overlay, with rules and dashboards in place", ("deploy/kubernetes",)),
    "systemd": Group("units for the exporter and a drop-in for SGLang's", ("deploy/systemd",)),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of this command."""
    groups = "\n".join(f"  {name:<12}{group.about}" for name, group in GROUPS.items())
    parser = subparsers.add_parser(
        "assets",
        help="write the bundled dashboards, rules and deployment files",
        description=f"Write the files of this version into a folder; existing files are replaced.\n\n{groups}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to; created if missing")
    parser.add_argument(
        "groups", metavar="WHAT", nargs="*", type=_group, help=f"{', '.join(GROUPS)} (default: all of them)"
    )


def _group(text: str) -> str:
    if text not in GROUPS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(GROUPS)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Write the files and say where they are.

    Returns:
        0; 2 when the folder cannot be written.
    """
    try:
        written = write(args.out, args.groups or list(GROUPS))
    except OSError as error:
        print(f"eagle-exporter assets: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def source_root() -> Path:
    """Return the folder that has ``deploy`` and ``grafana``: in the installed package, or the checkout."""
    package = Path(eagle_exporter.__file__).parent
    bundled = package / "assets"
    return bundled if bundled.is_dir() else package.parent


def write(out: Path, groups: list[str]) -> list[Path]:
    """Write the files of some groups below `out` and return their paths.

    Raises:
        OSError: Something cannot be written.
    """
    files: dict[str, bytes] = {}
    for name in groups:
        for source in GROUPS[name].sources:
            files.update(_files(source_root(), source))
    if "kubernetes" in groups:
        files.update(_kubernetes(source_root()))
    written = []
    for name in sorted(files):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
        written.append(path)
    return written


def _files(root: Path, source: str) -> Iterator[tuple[str, bytes]]:
    path = root / source
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".lint"):
            yield file.relative_to(root).as_posix(), file.read_bytes()


def _kubernetes(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield what the kustomize base reads besides its own files: kustomize takes none from outside its folder."""
    groups = [
        group for path in sorted((root / RULES).glob("*.yaml")) for group in yaml.safe_load(path.read_text())["groups"]
    ]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "eagle-exporter"},
        "spec": {"groups": groups},
    }
    text = yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=4096)
    yield f"{KUBERNETES}/prometheusrule.yaml", text.encode()
    for path in sorted((root / DASHBOARDS).glob("*.json")):
        # Compact: kubectl apply keeps a copy of the object in an annotation, which holds 256 KiB.
        dashboard = json.dumps(json.loads(path.read_text()), separators=(",", ":"), ensure_ascii=False)
        yield f"{KUBERNETES}/dashboards/{path.name}", dashboard.encode()
