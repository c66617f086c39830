"""Simulated days through the real rules in a real Prometheus: faults are found, and nothing else is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prometheus import backfill, simulation
from tests.prometheus.simulation import Life
from tests.tools import soak

LIVES: dict[str, Life] = {"short": backfill.SHORT}
if soak():
    LIVES |= {"calm": backfill.CALM, "faulty": backfill.FAULTY}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LIVES)
def test_faults_are_found_and_nothing_else_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    life = LIVES[name]
    shown = backfill.report(life, backfill.simulate(life, tmp_path))
    text = backfill.table(life, shown)
    with capsys.disabled():
        print(f"\n{text}")

    assert shown.false == [], text
    for fault in life.faults:
        assert set(shown.detections[fault.name]) >= backfill.FINDS[fault.name], text
    assert shown.informed == len(life.deploys) - 1


def test_costs_are_the_recorded_ones() -> None:
    assert simulation.phase_milliseconds("target_verify", 1, 62) == pytest.approx(5.05, rel=0.01)
    assert simulation.phase_milliseconds("target_verify", 1, 744) == pytest.approx(6.39, rel=0.01)
    assert simulation.phase_milliseconds("target_verify", 16, 69) == pytest.approx(6.82, rel=0.01)
    assert simulation.phase_milliseconds("target_verify", 16, 738) == pytest.approx(11.44, rel=0.01)


def test_a_firing_without_a_cause_counts_as_false() -> None:
    found = [
        backfill.Found("EagleVerifySlow", {}, simulation.DAY, simulation.DAY + 60),
        backfill.Found("EagleVerifySlow", {}, backfill.SHORT.faults[0].start + 1800, 0),
        backfill.Found("EagleVerifySlow", {}, backfill.SHORT.faults[-1].end + 1800, 0),
    ]
    shown = backfill.report(backfill.SHORT, found)

    assert shown.false == found[:1]
    assert shown.detections["verify +27 %"] == {"EagleVerifySlow": 30.0}
    assert shown.echoes == found[2:]
