"""Several ranks of the shipped recording against the shipped rules."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from deploy.prometheus import build
from eagle_exporter import catalogue
from eagle_exporter.demo import recording as recordings
from eagle_exporter.demo.replay import NO_FAULTS, Faults, Player
from eagle_exporter.registry.reader import RegistryReader
from tests.prometheus import servers

MINUTES = 50
CYCLES = 600
"""Played in each minute: about a twentieth of what the GPUs did in that time, so means vary more than they would."""
SIGNALS = {
    "rank:eagle_host_seconds_over_others:ratio_rate5m": build.SHIPPED.host_skew,
    "rank:eagle_gap_seconds_over_others:ratio_rate5m": build.SHIPPED.gap_skew,
    "rank:eagle_host_bound_cycles_over_others:ratio_rate5m": build.SHIPPED.host_bound_skew,
}


def played(root: Path, ranks: int, faults: Faults = NO_FAULTS) -> dict[str, list[float]]:
    """Return series -> its value in each minute, of what the rules about ranks read."""
    rules = build.Rules()
    rank_rules = " ".join(rule.expr for rule in rules.recordings())
    read = {metric.name for metric in catalogue.METRICS if re.search(rf"\b{metric.name}\b", rank_rules)}
    series: dict[str, list[float]] = defaultdict(list)
    player = Player(root, recordings.load(recordings.shipped(ranks)), ranks=ranks, faults=faults)
    try:
        for _ in range(MINUTES):
            player.play_cycles(CYCLES)
            for rank in RegistryReader(root).read().ranks:
                for name in read:
                    family = rank.family(name)
                    if family is None or family.bounds:
                        continue
                    for one in family.series:
                        labels = {**rank.labels, **dict(zip(family.labels, one.labels, strict=True))}
                        selector = ",".join(f'{key}="{value}"' for key, value in labels.items())
                        series[f'{name}{{job="eagle-exporter",{selector}}}'].append(one.value)
    finally:
        player.server.close()
    return series


def judged(directory: Path, series: dict[str, list[float]], expressions: dict[str, float]) -> str:
    """Return what promtool finds wrong when RankSkew is to be silent and each expression to have this one value."""
    for name, text in build.files().items():
        (directory / name).write_text(text)
    lines = [f"rule_files: [{', '.join(build.files())}]", "evaluation_interval: 1m", "tests:", "  - interval: 1m"]
    lines.append("    input_series:")
    for name, values in series.items():
        lines.append(f"      - {{series: '{name}', values: '{' '.join(format(value, '.9g') for value in values)}'}}")
    lines.append("    alert_rule_test:")
    lines += [f"      - {{eval_time: {minute}m, alertname: EagleRankSkew}}" for minute in range(16, MINUTES)]
    lines.append("    promql_expr_test:")
    for expression, value in expressions.items():
        lines.append(f"      - {{expr: '{expression}', eval_time: {MINUTES - 1}m, exp_samples: [{{value: {value}}}]}}")
    file = directory / "replay.test.yaml"
    file.write_text("\n".join(lines) + "\n")
    return servers.run_promtool("test", "rules", file)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_that_were_recorded_without_a_fault_do_not_alert(tmp_path: Path, ranks: int) -> None:
    series = played(tmp_path / "registry", ranks)
    there = {f"count({signal})": float(ranks) for signal in SIGNALS}
    # With a margin: the rules are not quiet by a hair.
    far = {f"max(avg_over_time({signal}[30m])) < bool {limit / 2:g}": 1.0 for signal, limit in SIGNALS.items()}
    found = judged(tmp_path, series, {**there, **far})
    assert "FAILED" not in found, found


def test_a_slow_host_among_the_recorded_ranks_is_named(tmp_path: Path) -> None:
    series = played(tmp_path / "registry", 8, Faults(slow_rank=5, host_factor=2.5))
    found = judged(tmp_path, series, {})
    assert "FAILED" in found
    assert set(re.findall(r'tp_rank="(\d+)"', found)) == {"5"}
