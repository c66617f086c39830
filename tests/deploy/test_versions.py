"""The version is written in one place; the deployment files must follow."""

from __future__ import annotations

import re

from eagle_exporter import __version__
from tests.tools import ROOT

# Our own image and package, not those of others.
MENTION = re.compile(
    r"eagle-exporter:(?:\$\{EAGLE_EXPORTER_VERSION:-)?(\d+\.\d+\.\d+)"
    r"|ARG VERSION=(\d+\.\d+\.\d+)"
    r"|name: eagle-exporter\n +newTag: (\S+)"
)


def test_every_mention_in_the_deployment_files_is_of_this_version() -> None:
    found = {}
    for path in [*(ROOT / "deploy").rglob("*"), ROOT / "README.md"]:
        if path.is_file() and path.suffix in ("", ".yaml", ".yml", ".md", ".conf", ".service"):
            versions = {next(filter(None, match)) for match in MENTION.findall(path.read_text())}
            if versions:
                found[path.relative_to(ROOT).as_posix()] = versions
    assert set(found) >= {
        "deploy/Dockerfile",
        "deploy/compose/compose.yaml",
        "deploy/kubernetes/base/kustomization.yaml",
    }
    assert {path: versions for path, versions in found.items() if versions != {__version__}} == {}
