"""SGLang before 0.5.13, really run: the V1 worker and the first V2, and what loads no plugins through ``launch``.

The same known answers and the same definitions as for the newest. The servers need more stand-ins than those of
newer versions (see `legacy`), so nothing is said about which phase takes how long.
"""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import free_port
from eagle_exporter.hooks import points
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from tests.service.exporter import wait_for
from tests.sglang import legacy
from tests.sglang.measured import (
    TOGETHER,
    Expected,
    Request,
    accept_histogram,
    expect,
    numbers,
    prompt,
    send_together,
)
from tests.sglang.runs import MORE_OLD_VERSIONS, OLD_VERSIONS, Run
from tests.tools import soak

FAMILY = {"EAGLEWorker": points.V1, "EAGLEWorkerV2": points.V2_06}

STOPPED: Request = (prompt(3, 20), 7)
"""Not asked for 7 tokens but for more, and ended by its seventh, in the middle of what a cycle accepted."""


def requests_of(run: Run) -> list[Request]:
    """Return what is sent at once.

    0.5.6 serves wrong tokens to the requests after one that ends with its prefill, in the batch of that prefill: its
    row stays in V1's draft input (``EagleDraftInput.filter_batch``).
    """
    return [(tokens, count) for tokens, count in TOGETHER if count > 1 or run.version != "0.5.6"]


Values = dict[tuple[str, tuple[str, ...]], float]
"""Name and labels of a series -> its value."""


class Counts:
    """What all ranks together counted between two moments."""

    def __init__(self, before: Values, after: Values) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, *labels: str) -> float:
        """Return the increase of one series."""
        return self._after[name, labels] - self._before.get((name, labels), 0.0)

    def by_label(self, name: str) -> dict[str, float]:
        """Return the increase of each series of a family with one label."""
        return {labels[0]: self(key, *labels) for key, labels in self._after if key == name}

    def total(self, name: str) -> float:
        """Return the increase of a family, summed over its series."""
        return sum(self(key, *labels) for key, labels in self._after if key == name)


@dataclass
class Sent:
    """Requests, SGLang's answers to them, and what was counted meanwhile."""

    requests: list[Request]
    replies: list[dict[str, Any]]
    counted: Counts
    expected: Expected


@dataclass
class Measured:
    """A server after its requests."""

    run: Run
    ranks: tuple[RankSnapshot, ...]
    together: Sent
    stopped: Sent
    log: str
    scraped: dict[str, float] = field(default_factory=dict)


def read(registry: RegistryReader) -> Values:
    """Return every series, summed over the ranks; a bucket of a histogram as a series with one label more."""
    snapshot = registry.read()
    assert snapshot.skipped == {}
    total: Values = defaultdict(float)
    for rank in snapshot.ranks:
        for (name, labels), values in numbers(rank).items():
            total[name, labels] += values[0]
            for index, value in enumerate(values[1:]):
                total[f"{name}_bucket", (*labels, str(index))] += value
    return dict(total)


def settled(registry: RegistryReader) -> Values:
    """Return what is counted when nothing runs and the numbers stand still: answers arrive before the last commit."""
    seen = [read(registry)]

    def still() -> bool:
        time.sleep(0.5)
        now = read(registry)
        # Looking around costs the hooks a little, also when nothing happens.
        same = {key for key in now if now[key] != seen[0].get(key)} <= {("eagle_hook_host_seconds_total", ())}
        running = sum(value for (name, _), value in now.items() if name == "eagle_running_requests")
        seen[0] = now
        return same and running == 0

    wait_for(still, 60, "the schedulers coming to rest")
    return seen[0]


@pytest.fixture(scope="module", params=[*OLD_VERSIONS, *(MORE_OLD_VERSIONS if soak() else ())], ids=str)
def measured(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Measured]:
    run: Run = request.param
    directory = tmp_path_factory.mktemp(str(run))
    registry = RegistryReader(directory / "registry")
    port = free_port()
    listen = {"EAGLE_EXPORTER_EMBED": "1", "EAGLE_EXPORTER_LISTEN": f"127.0.0.1:{port}"}
    with legacy.start(models, run, directory, environment=listen if run.launched else None) as server:
        first = settled(registry)
        requests = requests_of(run)
        together = send_together(server, requests)
        middle = settled(registry)
        tokens, count = STOPPED
        last_token = answers.expected_tokens(tokens, count)[-1]
        stopped = server.generate([tokens], 3 * count, stop_token_ids=[last_token])
        last = settled(registry)
        result = Measured(
            run,
            registry.read().ranks,
            Sent(requests, together, Counts(first, middle), expect(requests, run.configuration)),
            Sent([STOPPED], stopped, Counts(middle, last), expect([STOPPED], run.configuration)),
            server.log(),
        )
        if run.launched:
            wait_for(lambda: scrape(port).get("eagle_output_tokens_total") == last["eagle_output_tokens_total", ()], 30)
            result.scraped = scrape(port)
        yield result


def scrape(port: int) -> dict[str, float]:
    """Return the exporter's samples, summed over their labels; nothing while it is starting."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
    except OSError:
        return {}
    total: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            total[sample.name] += sample.value
    return dict(total)


@pytest.fixture(params=["together", "stopped"])
def sent(request: pytest.FixtureRequest, measured: Measured) -> Sent:
    chosen: Sent = getattr(measured, request.param)
    return chosen


def test_every_hook_of_the_workers_family_is_up_and_none_failed(measured: Measured) -> None:
    family = FAMILY[measured.run.worker]
    assert len(measured.ranks) == measured.run.data_parallel
    for rank in measured.ranks:
        assert rank.alive
        config = rank.family("eagle_spec_config_info")
        assert config is not None
        assert dict(zip(config.labels, config.series[0].labels, strict=True))["hook_family"] == family.name
        hooks = rank.family("eagle_hook_up")
        assert hooks is not None
        up = {series.labels[0]: series.value for series in hooks.series}
        assert up == dict.fromkeys(up, 1.0)
        assert set(family.hooks) | {"identity"} <= set(up)
        assert {rank.value("eagle_hook_errors_total", hook) for hook in catalogue.HOOKS} == {0.0}
        assert rank.value("eagle_timing_enabled", "on") == 1


def test_the_log_names_each_rank_once_and_no_error(measured: Measured) -> None:
    log = measured.log
    name = FAMILY[measured.run.worker].name
    assert log.count("eagle-exporter: measuring") == measured.run.data_parallel
    assert log.count(f"hooks of family {name} all up") == measured.run.data_parallel
    ours = [line for line in log.splitlines() if "eagle-exporter:" in line and " measuring " not in line]
    # The exporter beside the server says that it listens.
    assert [line for line in ours if "WARN" in line or "ERROR" in line or "not measured" in line] == []


def test_every_replica_counted_some_of_it(measured: Measured) -> None:
    for rank in measured.ranks:
        assert (rank.value("eagle_drafts_total") or 0) > 0


def test_the_served_tokens_are_the_models(sent: Sent) -> None:
    for (tokens, count), reply in zip(sent.requests, sent.replies, strict=True):
        assert reply["output_ids"] == answers.expected_tokens(tokens, count)


def test_drafts_are_those_of_the_construction_and_of_sglang(sent: Sent) -> None:
    assert sent.counted("eagle_drafts_total") == sent.expected.drafts
    assert sent.expected.drafts == sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in sent.replies)
    assert sent.counted("eagle_draft_tokens_total") == sent.expected.draft_tokens


def test_accepted_tokens_are_counted_in_full_and_output_up_to_its_end(sent: Sent) -> None:
    """A request ends in the middle of what its last cycle accepted, by its length or by a stop token."""
    assert sent.counted("eagle_accepted_tokens_total") == sent.expected.accepted
    assert sent.counted("eagle_verified_tokens_total") == sent.expected.accepted + sent.expected.drafts
    assert sent.counted("eagle_output_tokens_total") == sent.expected.output
    # Otherwise in full and up to the end would be the same.
    verified = sent.expected.accepted + sent.expected.drafts + len(sent.requests)
    assert verified > sent.expected.output


def test_every_accept_length_is_that_of_the_construction_and_of_sglang(measured: Measured, sent: Sent) -> None:
    buckets = [
        sent.counted("eagle_accept_length_tokens_bucket", str(index))
        for index in range(len(sent.expected.accept_lengths) + 1)
    ]
    assert buckets == [*sent.expected.accept_lengths, 0]
    # 0.5.6 has no histogram of its own.
    if measured.run.version != "0.5.6":
        lengths = sent.expected.accept_lengths
        assert accept_histogram(sent.replies, len(lengths)) == lengths


def test_every_position_is_that_of_the_construction(sent: Sent) -> None:
    positions = [str(position) for position in range(len(sent.expected.accepted_per_position))]
    assert [
        sent.counted("eagle_accepted_tokens_per_pos_total", position) for position in positions
    ] == sent.expected.accepted_per_position
    assert [sent.counted("eagle_offered_tokens_per_pos_total", position) for position in positions] == [
        sent.expected.drafts
    ] * len(positions)


def test_context_lengths_are_those_of_the_requests(sent: Sent) -> None:
    assert sent.counted.by_label("eagle_context_drafts_total") == sent.expected.context_drafts
    assert sent.counted.by_label("eagle_context_accepted_tokens_total") == sent.expected.context_accepted
    assert sent.counted.total("eagle_batch_context_tokens_total") == sent.expected.context_tokens


def test_only_the_overlap_loop_of_v2_verifies_a_row_too_many(measured: Measured, sent: Sent) -> None:
    overlapped = measured.run.worker == "EAGLEWorkerV2"
    assert sent.counted("eagle_wasted_rows_total") == (sent.expected.requests if overlapped else 0)
    excluded = sent.counted.by_label("eagle_cycles_excluded_total")
    assert (excluded.pop("no_live_row") > 0) == overlapped
    assert set(excluded.values()) == {0}


def test_phases_sum_to_the_cycle(sent: Sent) -> None:
    cycle = sent.counted("eagle_cycle_duration_seconds")
    assert cycle > 0
    assert sent.counted.total("eagle_phase_duration_seconds") == pytest.approx(cycle, rel=1e-9)
    assert sent.counted.total("eagle_batch_phase_seconds_total") == pytest.approx(cycle, rel=1e-9)


def test_every_cycle_was_timed_in_every_phase(sent: Sent) -> None:
    cycles = sent.counted("eagle_cycles_total")
    assert cycles > 0
    assert sum(sent.counted.by_label("eagle_cycle_duration_seconds_bucket").values()) == cycles
    for phase in catalogue.PHASES:
        count = sum(
            sent.counted("eagle_phase_duration_seconds_bucket", phase, str(index))
            for index in range(len(catalogue.DURATION_BUCKETS) + 1)
        )
        assert count == cycles, phase


def test_the_models_take_time_in_their_phases(measured: Measured) -> None:
    seconds = measured.together.counted.by_label("eagle_phase_duration_seconds")
    assert set(seconds) == set(catalogue.PHASES)
    assert min(seconds.values()) > 0
    steps = measured.together.counted.by_label("eagle_draft_step_seconds_total")
    assert set(steps) == {"1", "2"}
    assert min(steps.values()) > 0
    assert sum(steps.values()) <= seconds["draft_steps"]
    prefill = measured.together.counted.by_label("eagle_prefill_phase_duration_seconds")
    assert set(prefill) == set(catalogue.PREFILL_PHASES)
    assert min(prefill.values()) > 0


def test_the_exporter_beside_a_launched_server_serves_its_counts(measured: Measured) -> None:
    if not measured.run.launched:
        assert measured.scraped == {}
        return
    both = [measured.together.expected, measured.stopped.expected]
    assert measured.scraped["eagle_drafts_total"] == sum(expected.drafts for expected in both)
    assert measured.scraped["eagle_accepted_tokens_total"] == sum(expected.accepted for expected in both)
