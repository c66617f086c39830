"""What `advise` predicts for fewer steps from one run, against runs of those steps, on the real SGLang.

On the CPU, where a cycle's time wanders with whatever else the machine does: the test holds what does not depend on
speed (tokens per cycle, which are exact) and prints the errors of what does.
"""

from __future__ import annotations

from pathlib import Path

from eagle_exporter.analysis.baseline import Baseline, baseline_step, measured_baseline
from eagle_exporter.analysis.observations import SeriesKey, Server, difference, observe
from eagle_exporter.analysis.whatif import compare_with_runs, what_if
from eagle_exporter.demo import answers
from eagle_exporter.registry.reader import RankSnapshot
from tests.sglang.measured import Configuration, Request, prompt, settled, start

REQUESTS: list[Request] = [(prompt(20 + row, 7 * row + 3), 160) for row in range(2)]
RUNNING = 5
"""The run that predicts."""


def samples(rank: RankSnapshot) -> dict[SeriesKey, float]:
    """Return a rank's scalar series as the analysis reads them."""
    return {
        (family.name, tuple(sorted({**rank.labels, **dict(zip(family.labels, series.labels, strict=True))}.items()))): (
            series.value
        )
        for family in rank.families
        if family.kind != "histogram"
        for series in family.series
    }


def run(models: Path, python: str, directory: Path, num_steps: int) -> Server:
    """Serve the requests with so many steps (0: without speculation); return what was observed."""
    directory.mkdir()
    configuration = Configuration(num_steps=num_steps, num_draft_tokens=num_steps + 1) if num_steps else None
    with start(models, python, configuration, directory, environment={"EAGLE_EXPORTER_ENABLED": "1"}) as server:
        for _ in range(2):  # the first time everything is slow
            before = settled(directory / "registry")
            replies = server.generate([tokens for tokens, _ in REQUESTS], [count for _, count in REQUESTS])
            after = settled(directory / "registry")
        assert [reply["output_ids"] for reply in replies] == [
            answers.expected_tokens(tokens, count) for tokens, count in REQUESTS
        ]
    (observed,) = observe(difference(samples(before), samples(after)))
    return observed


def test_fewer_steps_are_predicted_from_one_run(models: Path, sglang_python: str, tmp_path: Path) -> None:
    plain = run(models, sglang_python, tmp_path / "plain", 0)
    baseline = measured_baseline(plain)
    assert isinstance(baseline, Baseline)
    running = run(models, sglang_python, tmp_path / "running", RUNNING)
    tested = {steps: run(models, sglang_python, tmp_path / f"steps{steps}", steps) for steps in (1, 2, 3)}

    comparisons = compare_with_runs(running, list(tested.values()), baseline)
    print("\nbatch  steps   predicted tok/s (band)   measured   error")
    for item in comparisons:
        assert item.predicted is not None
        assert item.measured > 0
        assert item.error is not None
        print(
            f"{item.batch_size:>5} {item.num_steps:>6}   {item.predicted.value:7.1f} ({item.predicted.low:.1f} to "
            f"{item.predicted.high:.1f}) {item.measured:>12.1f} {item.error:>+8.1%}"
        )
    compared = {(item.batch_size, item.num_steps) for item in comparisons}
    assert {steps for _, steps in compared} == {1, 2, 3}

    batch_size = max(running.batch_sizes(), key=lambda size: sum(cell.cycles for cell in running.at(size)))
    answer = what_if(
        running.at(batch_size), running.positions, baseline_step(batch_size, running, baseline), topk=running.topk
    )
    assert answer is not None
    predicted = {item.num_steps: item.tokens_per_cycle for item in answer.predictions}
    for steps, server in tested.items():
        cells = [cell for size in server.batch_sizes() for cell in server.at(size)]
        length = 1 + sum(cell.accepted for cell in cells) / sum(cell.drafts for cell in cells)
        estimate = predicted[steps]
        assert estimate is not None
        print(f"{steps} steps: {estimate.value:.3f} tokens per cycle predicted, {length:.3f} in the run")
        # A chain's draft does not depend on how far it goes on. Only where the cycles begin differs between the runs.
        assert abs(estimate.value - length) < 0.15 * length
    speeds = {item.num_steps: item.measured for item in comparisons if item.batch_size == batch_size}
    speeds[RUNNING] = max(cell.tokens_per_second or 0.0 for cell in running.at(batch_size))
    fastest = max(speeds, key=lambda steps: speeds[steps])
    print(
        f"fastest run at batch size {batch_size}: {fastest} steps, {speeds[fastest]:.0f} tok/s; advised: {answer.best}"
    )
    assert answer.best is not None
