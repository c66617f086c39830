"""What is measured where not everything is there: a renamed function, a server without speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from tests.service.exporter import wait_for
from tests.sglang.measured import ROOT, TOGETHER, Configuration, expect, one_rank, send_together, settled, start

TOKENS = [answers.expected_tokens(prompt, count) for prompt, count in TOGETHER]


def test_a_function_that_is_gone_costs_only_what_needs_it(models: Path, sglang_python: str, tmp_path: Path) -> None:
    """Without the hooks of KV preparation and of the scheduler's loop, as in an SGLang that has renamed both."""
    configuration = Configuration(overlap=True)
    expected = expect(TOGETHER, configuration)
    with start(
        models,
        sglang_python,
        configuration,
        tmp_path,
        environment={"EAGLE_FAULTS_RENAMED": "kv_prepare,scheduler"},
        plugin_path=[ROOT / "tests" / "sglang" / "fault_plugin"],
    ) as server:
        assert [reply["output_ids"] for reply in send_together(server)] == TOKENS
        # Nobody tells when the scheduler is idle, and still every count is out when the answers are, or a moment later.
        registry = tmp_path / "registry"
        wait_for(lambda: one_rank(registry).value("eagle_drafts_total") == expected.drafts, 30, "every draft counted")
        rank = one_rank(registry)
        log = server.log()
    up = {hook: rank.value("eagle_hook_up", hook) for hook in catalogue.HOOKS}
    assert {hook for hook, value in up.items() if value == 0.0} == {"kv_prepare", "scheduler"}
    for hook in ("kv_prepare", "scheduler"):
        assert log.count(f"hook {hook!r} is down") == 1
    assert rank.value("eagle_drafts_total") == expected.drafts
    assert rank.value("eagle_accepted_tokens_total") == expected.accepted
    assert rank.value("eagle_output_tokens_total") == expected.output
    # What cannot be told apart without them is not shown, rather than shown wrong or as 0.
    phases = rank.family("eagle_phase_duration_seconds")
    assert phases is not None
    assert {series.labels[0] for series in phases.series} == {
        "draft_steps",
        "target_verify",
        "draft_extend",
        "verify_overhead",
    }
    assert rank.family("eagle_cycle_gap_seconds") is None
    assert rank.family("eagle_running_requests") is None
    cycle = rank.family("eagle_cycle_duration_seconds")
    assert cycle is not None
    assert sum(cycle.series[0].buckets) == rank.value("eagle_cycles_total")


def test_plain_decode_is_measured_when_asked_for(models: Path, sglang_python: str, tmp_path: Path) -> None:
    """The baseline for speculation: what a step costs without it, under num_steps="0"."""
    with start(models, sglang_python, None, tmp_path, environment={"EAGLE_EXPORTER_ENABLED": "1"}) as server:
        assert [reply["output_ids"] for reply in send_together(server)] == TOKENS
        rank = settled(tmp_path / "registry")
    decoded = sum(count - 1 for _, count in TOGETHER)  # the first token of each comes from its prefill
    rows = rank.family("eagle_batch_drafts_total")
    assert rows is not None
    assert {series.labels[1] for series in rows.series if series.value} == {"0"}
    assert sum(series.value for series in rows.series) == decoded
    assert rank.value("eagle_output_tokens_total") == sum(count for _, count in TOGETHER)
    assert rank.value("eagle_drafts_total") == 0.0, "nothing was drafted"
    cycles = rank.family("eagle_batch_cycles_total")
    assert cycles is not None
    assert sum(series.value for series in cycles.series) == rank.value("eagle_cycles_total")
    histogram = rank.family("eagle_cycle_duration_seconds")
    assert histogram is not None
    assert sum(histogram.series[0].buckets) == 0, "histograms are for cycles that speculate"
    phases = rank.family("eagle_batch_phase_seconds_total")
    assert phases is not None
    seconds = {
        phase: sum(series.value for series in phases.series if series.labels[2] == phase) for phase in catalogue.PHASES
    }
    assert seconds["target_verify"] > 0.5 * sum(seconds.values()), "the target's forward is most of a plain step"
    assert seconds["draft_steps"] == seconds["draft_extend"] == 0.0
    assert rank.value("eagle_spec_num_steps") == 0.0
    assert [rank.value("eagle_hook_errors_total", hook) for hook in catalogue.HOOKS] == pytest.approx(
        [0.0] * len(catalogue.HOOKS)
    )
