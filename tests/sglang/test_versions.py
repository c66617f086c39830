"""The other SGLang versions that were really run: the same known answers, hooks all up.

0.5.23 runs with data parallelism: it loads plugins in the detokenizer and in the controller too, where ours must do
nothing, and each replica counts its own. 0.5.18 is started by ``eagle-exporter launch``, which must change nothing
where SGLang loads the plugin by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import LAUNCH
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from tests.service.exporter import wait_for
from tests.sglang.measured import TOGETHER, accept_histogram, expect, interpreter, send_together, start
from tests.sglang.runs import OTHER_VERSIONS, Run


def total(ranks: tuple[RankSnapshot, ...], name: str, *labels: str) -> float:
    """Return the sum of a series over the ranks."""
    return sum(rank.value(name, *labels) or 0.0 for rank in ranks)


@pytest.mark.parametrize("run", OTHER_VERSIONS, ids=str)
def test_every_hook_attaches_and_every_count_is_the_known_answer(run: Run, models: Path, tmp_path: Path) -> None:
    configuration, replicas = run.configuration, run.data_parallel
    expected = expect(TOGETHER, configuration)
    launcher: dict[str, Any] = {"launcher": LAUNCH} if run.version == "0.5.18" else {}
    with start(models, interpreter(run.version), configuration, tmp_path, data_parallel=replicas, **launcher) as server:
        replies = send_together(server)
        registry = RegistryReader(tmp_path / "registry")
        wait_for(
            lambda: total(registry.read().ranks, "eagle_output_tokens_total") == expected.output,
            30,
            "all tokens being counted",
        )
        wait_for(lambda: total(registry.read().ranks, "eagle_running_requests") == 0, 30)
        snapshot = registry.read()
        log = server.log()
    assert snapshot.skipped == {}
    ranks = snapshot.ranks
    assert len(ranks) == replicas
    assert all(rank.alive for rank in ranks)
    assert log.count("eagle-exporter: measuring") == replicas
    assert "Traceback" not in "\n".join(line for line in log.splitlines() if "eagle" in line)
    for rank in ranks:
        assert [rank.value("eagle_hook_up", hook) for hook in catalogue.HOOKS] == [1.0] * len(catalogue.HOOKS)
        assert [rank.value("eagle_hook_errors_total", hook) for hook in catalogue.HOOKS] == [0.0] * len(catalogue.HOOKS)

    assert [reply["output_ids"] for reply in replies] == [
        answers.expected_tokens(prompt, count) for prompt, count in TOGETHER
    ]
    assert sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies) == expected.drafts
    assert accept_histogram(replies, configuration.num_steps + 1) == expected.accept_lengths

    assert total(ranks, "eagle_drafts_total") == expected.drafts
    assert total(ranks, "eagle_draft_tokens_total") == expected.draft_tokens
    assert total(ranks, "eagle_accepted_tokens_total") == expected.accepted
    assert [
        total(ranks, "eagle_accepted_tokens_per_pos_total", str(position))
        for position in range(configuration.num_steps)
    ] == expected.accepted_per_position
    timed = total(ranks, "eagle_cycles_total")
    assert timed > 0
    for rank in ranks:
        cycle = rank.family("eagle_cycle_duration_seconds")
        phases = rank.family("eagle_phase_duration_seconds")
        assert cycle is not None
        assert phases is not None
        assert sum(series.value for series in phases.series) == pytest.approx(cycle.series[0].value, rel=1e-9)
        assert sum(cycle.series[0].buckets) == rank.value("eagle_cycles_total")
