"""The breakdown of the last minutes: sums over sums, nothing invented, memory bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eagle_exporter import catalogue
from eagle_exporter.server import models
from eagle_exporter.server.view import RETIREMENT_SECONDS, RegistryView
from eagle_exporter.server.windows import Windows
from tests.ranks import PHASE_SECONDS, RankProcess, write_ended

if TYPE_CHECKING:
    from pathlib import Path

CYCLE_MS = 1e3 * sum(PHASE_SECONDS.values())


class Watch:
    """Windows on a clock of the test's own."""

    def __init__(self, root: Path) -> None:
        self.now = 1000.0
        self.windows = Windows(RegistryView(root, clock=lambda: self.now))
        self.windows.sample()

    def after(self, seconds: float, *, step: float = 1.0) -> models.Cycle:
        """Take a reading every `step` seconds until `seconds` have passed."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.windows.sample()
        return self.windows.cycle()


def share(window: models.Window, name: str) -> float | None:
    return next(phase.share for phase in window.phases if phase.phase == name)


def ms(window: models.Window, name: str) -> float | None:
    return next(phase.ms for phase in window.phases if phase.phase == name)


def test_means_are_sums_over_sums_of_what_happened_in_the_window(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        process.cycles(1000, batch_size=8, accepted=0)
        watch = Watch(tmp_path)
        process.cycles(30, accepted=1)
        slow = {**PHASE_SECONDS, "target_verify": 0.1}
        process.cycles(10, batch_size=4, accepted=3, phases=slow, gap=0.002)
        window = watch.after(10).servers[0].windows["10s"]
        assert window.seconds == pytest.approx(10)
        assert (window.cycles, window.timed_cycles) == (40, 40)
        assert window.cycles_per_second == pytest.approx(4)
        verify = (30 * 28.7 + 10 * 100) / 40
        cycle = (30 * CYCLE_MS + 10 * (CYCLE_MS + 71.3)) / 40
        assert ms(window, "target_verify") == pytest.approx(verify)
        assert window.cycle_ms == pytest.approx(cycle)
        assert window.verify_share == pytest.approx(verify / cycle)
        assert sum(phase.share or 0 for phase in window.phases) == pytest.approx(1)
        assert window.gap_ms == pytest.approx((30 * 0.4 + 10 * 2) / 40)
        # 30 drafts with one token accepted, 40 with three.
        assert window.accept_length == pytest.approx(1 + (30 + 120) / 70)
        assert window.tokens_per_second == pytest.approx((30 * 2 + 40 * 4) / 10)
        assert [(p.position, p.offered, p.accepted) for p in window.positions] == [
            (0, 70, 70),
            (1, 70, 40),
            (2, 70, 40),
        ]
        sizes = {size.batch_size: size for size in window.batch_sizes}
        assert set(sizes) == {"1", "3-4"}
        assert sizes["1"].cycle_ms == pytest.approx(CYCLE_MS)
        assert sizes["3-4"].accept_length == pytest.approx(4)
        # 4 requests, 4 tokens each, in a cycle and its gap.
        assert sizes["3-4"].tokens_per_second == pytest.approx(16 / ((CYCLE_MS + 71.3 + 2) / 1e3))


def test_each_window_forgets_what_is_older(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        watch = Watch(tmp_path)
        process.cycles(100)
        first = watch.after(5)
        assert {name: window.cycles for name, window in first.servers[0].windows.items()} == {
            "10s": 100,
            "1m": 100,
            "5m": 100,
        }
        later = watch.after(20)
        windows = later.servers[0].windows
        assert (windows["10s"].cycles, windows["1m"].cycles) == (0, 100)
        assert later.state is models.State.NO_TRAFFIC
        last = watch.after(400)
        assert last.servers[0].windows["5m"].cycles == 0


def test_a_window_covers_what_it_says_and_memory_does_not_grow(tmp_path: Path) -> None:
    with RankProcess(tmp_path):
        watch = Watch(tmp_path)
        counts = []
        for _ in range(30):
            document = watch.after(60)
            counts.append(watch.windows.readings)
        windows = document.servers[0].windows
        for name, seconds, slack in (("10s", 10, 1), ("1m", 60, 5), ("5m", 300, 13)):
            covered = windows[name].seconds
            assert covered is not None
            assert seconds <= covered <= seconds + slack
        assert max(counts) <= 80
        assert counts[-1] <= counts[6] + 2
        assert len(watch.windows._ranks) == 1


def test_without_a_cycle_everything_is_unknown_and_nothing_is_zero_or_nan(tmp_path: Path) -> None:
    with RankProcess(tmp_path):
        document = Watch(tmp_path).after(10)
        assert document.state is models.State.NO_TRAFFIC
        window = document.servers[0].windows["10s"]
        assert window.cycles == 0
        unknown = [
            window.cycle_ms,
            window.gap_ms,
            window.verify_share,
            window.accept_length,
            window.host_bound_share,
        ]
        assert unknown == [None] * 5
        assert all(phase.ms is None and phase.share is None for phase in window.phases)
        assert [phase.phase for phase in window.phases] == list(catalogue.PHASES)
        assert window.batch_sizes == []
        assert all(position.rate is None for position in window.positions)
        # No token in ten seconds is known: it is none.
        assert window.tokens_per_second == 0


def test_a_rank_that_began_within_the_window_counts_from_zero(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {"server": "old:1"}) as old:
        watch = Watch(tmp_path)
        with RankProcess(tmp_path, {"server": "young:1"}) as young:
            young.cycles(50)
            old.cycles(3)
            servers = {server.server: server for server in watch.after(10).servers}
            assert servers["young:1"].windows["10s"].cycles == 50
            assert servers["old:1"].windows["10s"].cycles == 3


def test_a_restart_within_the_window_counts_the_new_life_only(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        process.cycles(5000)
        watch = Watch(tmp_path)
        watch.after(3)
    with RankProcess(tmp_path) as process:
        process.cycles(20)
        document = watch.after(3)
        assert document.servers[0].windows["10s"].cycles == 20
        assert document.servers[0].windows["5m"].cycles == 20


def test_counts_from_before_the_exporter_started_are_in_no_window(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        process.cycles(5000)
        watch = Watch(tmp_path)
        assert watch.windows.cycle().servers[0].windows["5m"].cycles == 0
        assert watch.windows.cycle().servers[0].windows["5m"].seconds is None
        assert watch.after(10).servers[0].windows["5m"].cycles == 0


def test_a_server_is_pooled_over_its_recording_ranks(tmp_path: Path) -> None:
    plans = [{"tp_rank": rank, "recording": rank == 0} for rank in range(4)]
    with RankProcess(tmp_path, *plans) as process:
        watch = Watch(tmp_path)
        process.cycles(10, batch_size=2)
        server = watch.after(10).servers[0]
        # Four ranks time the same cycle: it is one cycle.
        assert server.windows["10s"].cycles == 10
        assert server.running_requests == 2
        assert [rank.windows["10s"].cycles for rank in server.ranks] == [10] * 4
        assert [rank.recording for rank in server.ranks] == [True, False, False, False]
        assert server.ranks[1].windows["10s"].accept_length is None
        assert server.ranks[1].windows["10s"].tokens_per_second is None
        assert server.ranks[1].windows["10s"].cycle_ms == pytest.approx(CYCLE_MS)


def test_replicas_add_up(tmp_path: Path) -> None:
    # Two recording ranks of one server: two replicas under data parallelism.
    with RankProcess(tmp_path, {"tp_rank": 0}, {"tp_rank": 1}) as process:
        watch = Watch(tmp_path)
        process.cycles(10, accepted=1)
        server = watch.after(10).servers[0]
        assert server.windows["10s"].cycles == 20
        assert server.windows["10s"].tokens_per_second == pytest.approx(4)
        assert server.windows["10s"].cycle_ms == pytest.approx(CYCLE_MS)
        assert server.running_requests == 2


def test_a_missing_phase_makes_the_cycle_unknown_instead_of_short(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {"hooks_down": ["target_verify"]}) as process:
        watch = Watch(tmp_path)
        process.cycles(10)
        server = watch.after(10).servers[0]
        window = server.windows["10s"]
        assert server.ranks[0].hooks_down == ["target_verify"]
        assert window.cycles == 10
        assert window.cycle_ms is None
        assert window.verify_share is None
        assert ms(window, "target_verify") is None
        assert ms(window, "draft_steps") == pytest.approx(0.87)
        assert share(window, "draft_steps") is None
        assert window.accept_length == pytest.approx(2)


def test_hooks_of_a_server_that_was_switched_off_are_not_taken_for_missing(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {"hooks_down": ["kv_compact"]}) as process:
        process.stop_timing("off")
        rank = Watch(tmp_path).after(1).servers[0].ranks[0]
    assert (rank.timing_state, rank.hooks_down) == ("off", ["kv_compact"])


def test_servers_that_run_come_before_those_that_have_ended(tmp_path: Path) -> None:
    write_ended(tmp_path, {"server": "a"}, {"server": "c"})
    with RankProcess(tmp_path, {"server": "b"}, {"server": "d"}):
        found = Watch(tmp_path).after(1)
    assert [server.server for server in found.servers] == ["b", "d", "a", "c"]


def test_a_phase_that_one_of_two_replicas_lacks_is_unknown_for_both_together(tmp_path: Path) -> None:
    with RankProcess(tmp_path, {"tp_rank": 0}, {"tp_rank": 1, "hooks_down": ["draft_extend"]}) as process:
        watch = Watch(tmp_path)
        process.cycles(10)
        server = watch.after(10).servers[0]
        assert ms(server.windows["10s"], "draft_extend") is None
        assert ms(server.windows["10s"], "target_verify") == pytest.approx(28.7)
        assert ms(server.ranks[0].windows["10s"], "draft_extend") == pytest.approx(0.29)


def test_plain_decode_is_shown_only_when_there_is_nothing_else(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        watch = Watch(tmp_path)
        plain = dict.fromkeys(PHASE_SECONDS, 0.0) | {"target_verify": 0.0111}
        process.cycles(10, num_steps=0, phases=plain)
        window = watch.after(5).servers[0].windows["10s"]
        assert window.cycle_ms == pytest.approx(11.1)
        assert window.accept_length is None
        process.cycles(10)
        window = watch.after(1).servers[0].windows["10s"]
        assert window.cycle_ms == pytest.approx(CYCLE_MS)
        assert [(size.batch_size, size.num_steps) for size in window.batch_sizes] == [("1", "0"), ("1", "3")]


def test_an_ended_rank_has_no_gauges_and_its_last_cycles_stay_in_the_windows(tmp_path: Path) -> None:
    with RankProcess(tmp_path) as process:
        watch = Watch(tmp_path)
        process.cycles(10)
        process.kill()
        document = watch.after(5)
    rank = document.servers[0].ranks[0]
    assert document.state is models.State.ALL_ENDED
    assert (rank.up, rank.running_requests, rank.timing_state, rank.num_steps) == (False, None, None, None)
    assert rank.windows["10s"].cycles == 10
    retired = watch.after(RETIREMENT_SECONDS + 1, step=60).servers[0].ranks[0]
    assert retired.windows["5m"].seconds is None


def test_the_state_names_what_is_to_know_first(tmp_path: Path) -> None:
    assert Watch(tmp_path).windows.cycle().state is models.State.NO_RANK
    write_ended(tmp_path)
    assert Watch(tmp_path).windows.cycle().state is models.State.ALL_ENDED
    with RankProcess(tmp_path) as process:
        watch = Watch(tmp_path)
        assert watch.windows.cycle().state is models.State.NO_TRAFFIC
        process.cycles(1)
        assert watch.after(1).state is models.State.LIVE


@pytest.mark.parametrize("value", [1e308, 1e17, float("inf")])
def test_absurd_values_of_one_file_break_nothing(tmp_path: Path, value: float) -> None:
    with RankProcess(tmp_path, {}, {"server": "b:1"}) as process:
        watch = Watch(tmp_path)
        process.cycles(10, rank=0)
        if value != float("inf"):  # the reader refuses an infinite counter
            for name in ("eagle_cycles_total", "eagle_output_tokens_total", "eagle_host_bound_cycles_total"):
                process.set(name, value, rank=1)
            for labels in (("1", "3"), ("2", "3")):
                process.set("eagle_batch_cycles_total", value, *labels, rank=1)
        for name in ("eagle_running_requests", "eagle_spec_num_steps", "eagle_last_cycle_timestamp_seconds"):
            process.set(name, value, rank=1)
        document = watch.after(10)
        servers = {server.server: server for server in document.servers}
        assert servers["node-a:30000"].windows["10s"].cycles == 10
        assert servers["b:1"].ranks[0].num_steps is None
        assert servers["b:1"].running_requests is None
        assert b"NaN" not in watch.windows.document()
        assert b"Infinity" not in watch.windows.document()
