"""The other SGLang versions that were really run: the same known answers, hooks all up.

0.5.23 runs with data parallelism: it loads plugins in the detokenizer and in the controller too, where ours must do
nothing, and each replica counts its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import meta_accept_histogram
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from tests.service.exporter import wait_for
from tests.sglang.measured import TOGETHER, Configuration, expect, interpreter, send_together, start

VERSIONS = (
    ("0.5.16", Configuration(overlap=True), 1),
    ("0.5.18", Configuration(topk=4, num_draft_tokens=8), 1),
    ("0.5.23", Configuration(topk=4, num_draft_tokens=8, overlap=True), 2),
)


def total(ranks: tuple[RankSnapshot, ...], name: str, *labels: str) -> float:
    """Return the sum of a series over the ranks."""
    return sum(rank.value(name, *labels) or 0.0 for rank in ranks)


@pytest.mark.parametrize(("version", "configuration", "replicas"), VERSIONS, ids=[v for v, _, _ in VERSIONS])
def test_every_hook_attaches_and_every_count_is_the_known_answer(
    version: str, configuration: Configuration, replicas: int, models: Path, tmp_path: Path
) -> None:
    expected = expect(TOGETHER, configuration)
    with start(models, interpreter(version), configuration, tmp_path, data_parallel=replicas) as server:
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
    histogram = [0] * (configuration.num_steps + 1)
    for reply in replies:
        for accepted, count in enumerate(meta_accept_histogram(reply["meta_info"])):
            histogram[accepted] += count
    assert histogram == expected.accept_lengths

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
