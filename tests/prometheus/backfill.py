"""Puts a simulated life into a Prometheus and asks it which alerts fire."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from deploy.prometheus import build
from tests.prometheus import alerting, servers
from tests.prometheus.simulation import DAY, HOUR, MINUTE, Deploy, Fault, Life, Server

#: A Monday, 0 o'clock, at a block boundary of Prometheus (a multiple of 54 hours).
START = 54 * HOUR * 8800 - (54 * HOUR * 8800 - 4 * DAY) % (7 * DAY)
_BLOCK = "162h"
_CHUNK = 2 * DAY


def _at(day: int, hour: int) -> int:
    return day * DAY + hour * HOUR


#: Thirty days without a fault: two configurations tried and one of them taken back, four restarts.
CALM = Life(
    days=30,
    deploys=(
        Deploy(0, "aaaa0001", 1.0),
        Deploy(_at(6, 10), "bbbb0002", 0.8),
        Deploy(_at(13, 15), "cccc0003", 1.15),
        Deploy(_at(14, 8), "bbbb0002", 0.8),
    ),
    restarts=(_at(3, 9), _at(9, 17), _at(19, 13), _at(24, 7)),
)

#: Thirty days with six faults of half a day on working days; the small one lasts longer.
FAULTY = Life(
    days=30,
    faults=(
        Fault("verify +27 %", _at(3, 10), 12, verify=1.27),
        Fault("acceptance -20 %", _at(8, 10), 12, acceptance=0.8),
        Fault("verify -27 %", _at(11, 10), 12, verify=0.73),
        Fault("a rank with a slow host", _at(16, 10), 12, slow_host=2.0),
        Fault("a slow GPU: all phases of all ranks +30 %", _at(21, 10), 12, everything=1.3),
        Fault("verify +10 %", _at(24, 10), 36, verify=1.1),
    ),
    restarts=(_at(2, 9),),
)

#: Five days for every run of the tests.
SHORT = Life(
    days=5,
    deploys=(Deploy(0, "aaaa0001", 1.0), Deploy(_at(0, 10), "bbbb0002", 0.8)),
    faults=(
        Fault("verify +27 %", _at(3, 10), 4, verify=1.27),
        Fault("acceptance -20 %", _at(3, 20), 3, acceptance=0.8),
        Fault("a rank with a slow host", _at(4, 8), 3, slow_host=2.0),
        Fault("a slow GPU: all phases of all ranks +30 %", _at(4, 16), 4, everything=1.3),
    ),
    restarts=(_at(2, 9),),
)

#: What must find a fault.
FINDS = {
    "verify +27 %": {"EagleVerifyShareDrift", "EagleVerifySlow"},
    "verify -27 %": {"EagleVerifyShareDrift"},
    "verify +10 %": {"EagleVerifyShareDriftSlow"},
    "acceptance -20 %": {"EagleAcceptanceDrift"},
    "a rank with a slow host": {"EagleRankSkew"},
    "a slow GPU: all phases of all ranks +30 %": {"EagleVerifySlow"},
}


@dataclass(frozen=True)
class Found:
    """An alert that fired in a simulation, in seconds from its beginning."""

    alert: str
    labels: dict[str, str]
    start: float
    end: float


def write_blocks(life: Life, directory: Path, data: Path) -> int:
    """Write the raw series as blocks of a Prometheus; returns the largest number of series in a scrape."""
    most = 0
    lines: list[str] = []
    end_of_chunk = START + _CHUNK

    def flush() -> None:
        if lines:
            file = directory / "samples.txt"
            file.write_text("\n".join([*lines, "# EOF", ""]))
            servers.promtool(
                "tsdb", "create-blocks-from", "openmetrics", "-q", f"--max-block-duration={_BLOCK}", file, data
            )
            file.unlink()
            lines.clear()

    for now, series in Server(life).minutes(START):
        if now >= end_of_chunk:
            flush()
            end_of_chunk += _CHUNK
        most = max(most, len(series))
        lines += [f"{name} {value:.9g} {now}" for name, value in series.items()]
    flush()
    return most


def needed(rules: build.Rules) -> set[str]:
    """Return the recording rules that alerts stand on, directly or through others."""
    by_name = {rule.record: rule for rule in rules.recordings()}
    found: set[str] = set()
    open_expressions = [alert.expr for alert in rules.all_alerts()]
    while open_expressions:
        names = set(re.findall(r"\w+:\w+:\w+", open_expressions.pop())) - found
        found |= names
        open_expressions += [by_name[name].expr for name in names]
    return found


def record(rules: build.Rules, directory: Path, data: Path, days: float) -> None:
    """Backfill the recording rules, level by level: promtool does not see what it records in the same run."""
    wanted = needed(rules)
    for level in range(1, max(rule.level for rule in rules.recordings()) + 1):
        groups = [
            build.Group(
                group.name,
                group.interval,
                tuple(
                    rule
                    for rule in group.rules
                    if isinstance(rule, build.Recording) and rule.level == level and rule.record in wanted
                ),
            )
            for group in rules.recording_groups()
        ]
        file = directory / f"level-{level}.yaml"
        file.write_text(build.render([group for group in groups if group.rules]))
        with servers.prometheus(data) as prometheus:
            output = directory / f"level-{level}"
            servers.promtool(
                *("tsdb", "create-blocks-from", "rules", f"--url={prometheus.url}", f"--start={START}"),
                *(f"--end={START + int(days * DAY)}", f"--output-dir={output}", f"--max-block-duration={_BLOCK}"),
                file,
            )
        for block in output.iterdir():
            block.rename(data / block.name)
        shutil.rmtree(output)


def simulate(life: Life, directory: Path, rules: build.Rules | None = None) -> list[Found]:
    """Return every firing of every alert in a life."""
    chosen = build.Rules() if rules is None else rules
    data = directory / "data"
    data.mkdir()
    most = write_blocks(life, directory, data)
    assert most <= 60, f"{most} series"
    record(chosen, directory, data, life.days)
    found = []
    end = START + int(life.days * DAY) - MINUTE
    with servers.prometheus(data) as prometheus:
        # What is asked for must be there: an alert over nothing is silent too.
        for record_name in sorted(needed(chosen)):
            if not record_name.startswith("replica"):  # one server, no replicas
                assert prometheus.active(record_name, START, end, HOUR), f"{record_name} was not recorded"
        for alert in chosen.all_alerts():
            for labels, active in prometheus.active(alert.expr, START, end).items():
                found += [
                    Found(alert.alert, dict(labels), firing.start - START, firing.end - START)
                    for firing in alerting.firings(
                        active,
                        range(START, end + 1, MINUTE),
                        for_seconds=alerting.seconds(alert.for_),
                        keep_firing_seconds=alerting.seconds(alert.keep_firing_for),
                    )
                ]
    return sorted(found, key=lambda one: one.start)


@dataclass(frozen=True)
class Report:
    """What a simulation has shown.

    Attributes:
        detections: Fault -> alert -> minutes from its beginning to the first firing.
        echoes: Firings within two days after a fault was repaired: the fault is part of the baseline then.
        false: Firings without any fault.
        informed: Firings of ConfigurationChanged, which belong to the deploys.

    """

    detections: dict[str, dict[str, float]]
    echoes: list[Found]
    false: list[Found]
    informed: int


def report(life: Life, found: list[Found]) -> Report:
    """Sort the firings of a simulation by what caused them."""
    detections: dict[str, dict[str, float]] = {fault.name: {} for fault in life.faults}
    echoes, false, informed = [], [], 0
    for one in found:
        causes = [fault for fault in life.faults if fault.start <= one.start < fault.end]
        if one.alert == "EagleConfigurationChanged" and any(0 <= one.start - d.start < HOUR for d in life.deploys):
            informed += 1
        elif causes:
            minutes = (one.start - causes[0].start) / MINUTE
            detections[causes[0].name].setdefault(one.alert, minutes)
        elif any(0 <= one.start - fault.end < 2 * DAY for fault in life.faults):
            echoes.append(one)
        else:
            false.append(one)
    return Report(detections, echoes, false, informed)


def table(life: Life, shown: Report) -> str:
    """Return the report as Markdown."""
    lines = ["| planted | for | found by | after |", "|---|---|---|---|"]
    for fault in life.faults:
        found = sorted(shown.detections[fault.name].items(), key=lambda item: item[1])
        for alert, minutes in found or [("not found", 0.0)]:
            after = f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
            lines.append(f"| {fault.name} | {fault.hours:g} h | {alert} | {after if found else '-'} |")
    summary = (
        f"False alarms in {life.days:g} days: {len(shown.false)}. "
        f"Echoes of repaired faults: {len(shown.echoes)}. ConfigurationChanged, for {len(life.deploys) - 1} deploys: "
        f"{shown.informed}."
    )
    lines += ["", summary]
    lines += [f"- {one.alert} {one.labels} day {one.start / DAY:.2f} to {one.end / DAY:.2f}" for one in shown.false]
    lines += [f"- echo: {one.alert}, day {one.start / DAY:.2f} to {one.end / DAY:.2f}" for one in shown.echoes]
    return "\n".join(lines)


def main() -> int:
    """Run the long simulations and print their tables."""
    for name, life in (("Without a fault", CALM), ("With six faults", FAULTY)):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            found = simulate(life, Path(directory))
        print(f"## {name}\n\n{table(life, report(life, found))}\n", flush=True)
        print(f"({time.monotonic() - started:.0f} s)\n", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
