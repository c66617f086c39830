"""Scrapes of the past: what the real collector shows at simulated moments, as blocks of a Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from eagle_exporter.server.collector import make_registry
from eagle_exporter.server.view import RegistryView
from tests.prometheus.servers import promtool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from prometheus_client import CollectorRegistry


class Scraped:
    """One exporter and the labels that a scrape config gives it."""

    def __init__(self, root: Path, target: Mapping[str, str]) -> None:
        """Read `root` under the labels `target`."""
        self._moment = 0.0
        self._told: dict[float, float] = {}
        # How long an ended rank stays is counted on the simulated clock.
        self._registry: CollectorRegistry = make_registry(RegistryView(root, clock=lambda: self._moment))
        self._target = ",".join(f'{name}="{value}"' for name, value in target.items())

    def lines(self, moment: float) -> list[str]:
        """Return one scrape as OpenMetrics lines with its time."""
        self._moment = moment
        result = [f"up{{{self._target}}} 1 {moment:.3f}"]
        for family in self._registry.collect():
            for sample in family.samples:
                value = sample.value
                if sample.name.endswith("_timestamp_seconds"):
                    # Written by the real clock: told as if it were that of the scrape that saw it first.
                    value = self._told.setdefault(value, value - (time.time() - moment))
                own = "".join(f',{name}="{text}"' for name, text in sample.labels.items())
                result.append(f"{sample.name}{{{self._target}{own}}} {value!r} {moment:.3f}")
        return result


def write_blocks(lines: Iterable[str], directory: Path, data: Path) -> None:
    """Turn OpenMetrics lines into blocks under `data`."""
    file = directory / "history.txt"
    with file.open("w") as output:
        for line in lines:
            output.write(line + "\n")
        output.write("# EOF\n")
    data.mkdir(parents=True, exist_ok=True)
    promtool("tsdb", "create-blocks-from", "openmetrics", "-q", file, data)
    file.unlink()
