from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.cli import demo as demo_command
from eagle_exporter.demo import recording as recordings
from eagle_exporter.demo.recording import DEFAULT_RECORDING, RANKS_RECORDING, Group, RecordingError
from eagle_exporter.demo.replay import Faults, Pause, Replay, ReplayError, traffic, write_cycles
from eagle_exporter.demo.sglang_server import free_port
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader

ROOT = Path(__file__).resolve().parents[2]
CONTENT: dict[str, Any] = json.loads(gzip.decompress(DEFAULT_RECORDING.read_bytes()))
"""The shipped recording of one GPU, read without the loader."""
RANKS_CONTENT: dict[str, Any] = json.loads(gzip.decompress(RANKS_RECORDING.read_bytes()))
"""That of two tensor-parallel ranks, which is played on more than one."""


def columns(batch: int) -> dict[str, Any]:
    return next(group["columns"] for group in CONTENT["groups"] if group["batch"] == batch)


def rank_columns(batch: int) -> list[dict[str, Any]]:
    """Return the columns of each recorded rank."""
    group = next(group for group in RANKS_CONTENT["groups"] if group["batch"] == batch)
    return [group["columns"], *group["other_ranks"]]


def seconds(nanoseconds: list[int | None]) -> float:
    return sum(value or 0 for value in nanoseconds) / 1e9


def ranks_of(root: Path) -> list[RankSnapshot]:
    snapshot = RegistryReader(root).read()
    assert snapshot.skipped == {}
    return sorted(snapshot.ranks, key=lambda rank: int(rank.labels["tp_rank"]))


def written(root: Path, count: int, **arguments: Any) -> list[RankSnapshot]:
    write_cycles(root, count, **arguments).server.close()
    return ranks_of(root)


def total(rank: RankSnapshot, name: str, **labels: str) -> float:
    """Sum of the series of a family with these labels; of a histogram its sum."""
    family = rank.family(name)
    assert family is not None, name
    return sum(
        series.value
        for series in family.series
        if all(series.labels[family.labels.index(label)] == value for label, value in labels.items())
    )


def observations(rank: RankSnapshot, name: str) -> int:
    family = rank.family(name)
    assert family is not None, name
    return sum(sum(series.buckets) for series in family.series)


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(("batch", "times", "more"), [(1, 0, 50), (4, 2, 0), (16, 1, 7)])
def test_counts_are_those_of_the_recording(tmp_path: Path, batch: int, times: int, more: int) -> None:
    """So many times the whole group, then a part of it."""
    table = columns(batch)
    length = len(table["rows"])
    chosen = [*(list(range(length)) * times), *range(more)]
    (rank,) = written(tmp_path, len(chosen), batches=[batch])
    accepted = [table["accepted"][i] for i in chosen]
    drafts = sum(map(len, accepted))
    tokens = sum(map(sum, accepted))
    assert total(rank, "eagle_cycles_total") == len(chosen)
    assert total(rank, "eagle_drafts_total") == drafts
    assert total(rank, "eagle_draft_tokens_total") == 3 * drafts
    assert total(rank, "eagle_accepted_tokens_total") == tokens
    assert total(rank, "eagle_output_tokens_total") == total(rank, "eagle_verified_tokens_total") == tokens + drafts
    for position in range(3):
        reached = sum(count > position for row in accepted for count in row)
        assert total(rank, "eagle_accepted_tokens_per_pos_total", position=str(position)) == reached
    assert observations(rank, "eagle_accept_length_tokens") == drafts
    assert total(rank, "eagle_wasted_rows_total") == sum(table["wasted"][i] for i in chosen)
    assert total(rank, "eagle_host_bound_cycles_total") == sum(table["host_bound"][i] is True for i in chosen)
    assert total(rank, "eagle_batch_context_tokens_total") == sum(sum(table["context"][i]) for i in chosen)
    gaps = [table["gap"][i] for i in chosen]
    assert total(rank, "eagle_cycle_gap_seconds") == pytest.approx(seconds(gaps), rel=1e-9)
    assert observations(rank, "eagle_cycle_gap_seconds") == sum(gap is not None for gap in gaps)
    for phase in catalogue.PHASES:
        device = seconds([table["phases"][phase][i] for i in chosen])
        host = seconds([table["host"][phase][i] for i in chosen])
        assert total(rank, "eagle_phase_duration_seconds", phase=phase) == pytest.approx(device, rel=1e-9)
        assert total(rank, "eagle_batch_phase_seconds_total", phase=phase) == pytest.approx(device, rel=1e-9)
        assert total(rank, "eagle_phase_host_seconds_total", phase=phase) == pytest.approx(host, rel=1e-9)
    sampled = [table["parts"][i] for i in chosen if table["parts"][i] is not None]
    assert total(rank, "eagle_verify_overhead_sampled_cycles_total") == len(sampled) > 0
    for number, part in enumerate(catalogue.VERIFY_OVERHEAD_PARTS):
        assert total(rank, "eagle_verify_overhead_part_seconds_total", part=part) == pytest.approx(
            seconds([parts[number] for parts in sampled]), rel=1e-9
        )
    assert total(rank, "eagle_draft_steps_total", step="1") == sum(bool(table["steps"][i]) for i in chosen)


def test_phases_sum_to_the_cycle(tmp_path: Path) -> None:
    for rank in written(tmp_path, 400, ranks=2):
        phases = total(rank, "eagle_batch_phase_seconds_total")
        assert phases > 400 * 0.004
        if rank.labels["tp_rank"] == "0":
            assert total(rank, "eagle_cycle_duration_seconds") == pytest.approx(phases, rel=1e-12)
            assert total(rank, "eagle_phase_duration_seconds") == pytest.approx(phases, rel=1e-12)


def test_a_node_of_eight_has_acceptance_once_and_timings_eight_times(tmp_path: Path) -> None:
    ranks = written(tmp_path, 200, ranks=8)
    assert [rank.labels["tp_rank"] for rank in ranks] == [str(number) for number in range(8)]
    acceptance = [metric.name for metric in catalogue.METRICS if metric.acceptance]
    assert "eagle_output_tokens_total" in acceptance
    first = ranks[0]
    for name in acceptance:
        assert first.family(name) is not None
    for rank in ranks[1:]:
        assert [name for name in acceptance if rank.family(name) is not None] == []
        assert rank.family("eagle_cycle_duration_seconds") is None
        assert total(rank, "eagle_batch_timed_cycles_total") == 200
        verify = total(rank, "eagle_batch_phase_seconds_total", phase="target_verify")
        recorded = ranks[int(rank.labels["tp_rank"]) % 2]
        expected = total(recorded, "eagle_batch_phase_seconds_total", phase="target_verify")
        assert verify == pytest.approx(expected, rel=1e-3)
        if rank is not recorded:
            host = total(rank, "eagle_phase_host_seconds_total") / total(recorded, "eagle_phase_host_seconds_total")
            assert 0.9 < host < 1.1
            assert abs(host - 1) > 1e-4
    assert len({total(rank, "eagle_batch_gap_seconds_total") for rank in ranks}) == 8
    assert len({rank.family("eagle_gpu_info") for rank in ranks}) == 8


def test_it_says_that_it_is_a_replay_and_of_what(tmp_path: Path) -> None:
    (rank,) = written(tmp_path, 1)
    assert rank.labels["model_name"] == "replay:llama-3-8b-shape"
    assert rank.labels["server"] == "replay"

    def info(name: str) -> dict[str, str]:
        family = rank.family(name)
        assert family is not None
        return dict(zip(family.labels, family.series[0].labels, strict=True))

    config = info("eagle_spec_config_info")
    assert (config["num_steps"], config["topk"], config["num_draft_tokens"]) == ("3", "1", "4")
    assert (config["sglang_version"], config["torch_version"]) == (CONTENT["run"]["sglang"], CONTENT["run"]["torch"])
    assert info("eagle_gpu_info")["name"] == "NVIDIA H200"
    assert info("eagle_timing_info")["clock"] == "cuda_event"
    assert total(rank, "eagle_timing_enabled", reason="on") == 1
    assert abs(total(rank, "eagle_last_cycle_timestamp_seconds") - time.time()) < 60
    assert 0 < total(rank, "eagle_hook_host_seconds_total") < 1


def of_three_ranks(path: Path) -> Path:
    """Write a recording of which the further ranks take 1 and 2 ms more in each phase, 3 and 6 ms in the gap."""
    content = copy.deepcopy(CONTENT)
    for group in content["groups"]:
        group["other_ranks"] = []
        for rank in (1, 2):
            table = {name: copy.deepcopy(group["columns"][name]) for name in RANK_COLUMNS}
            for name in ("phases", "host"):
                for phase in catalogue.PHASES:
                    table[name][phase] = [value + rank * 1_000_000 for value in table[name][phase]]
            table["gap"] = [None if value is None else value + rank * 3_000_000 for value in table["gap"]]
            table["host_bound"] = [rank == 2] * len(table["gap"])
            group["other_ranks"].append(table)
    path.write_text(json.dumps(content))
    return path


RANK_COLUMNS = ("host_bound", "gap", "steps", "parts", "phases", "host")


def test_recorded_ranks_are_played_as_they_are_and_further_ranks_take_their_places_in_turn(tmp_path: Path) -> None:
    recording = of_three_ranks(tmp_path / "three.json")
    assert recordings.load(recording).ranks == 3
    count = len(columns(4)["rows"])
    ranks = written(tmp_path / "registry", count, ranks=8, batches=[4], recording=recording)
    gaps = [gap for gap in columns(4)["gap"] if gap is not None]
    for number, rank in enumerate(ranks):
        recorded = number % 3
        device = 1e-9 if number < 3 else 1e-3
        host = 1e-9 if number < 3 else 0.07
        for phase in catalogue.PHASES:
            expected = seconds(columns(4)["phases"][phase]) + recorded * 1e-3 * count
            assert total(rank, "eagle_batch_phase_seconds_total", phase=phase) == pytest.approx(expected, rel=device)
            expected = seconds(columns(4)["host"][phase]) + recorded * 1e-3 * count
            assert total(rank, "eagle_phase_host_seconds_total", phase=phase) == pytest.approx(expected, rel=host)
        expected = seconds(gaps) + recorded * 3e-3 * len(gaps)
        assert total(rank, "eagle_batch_gap_seconds_total") == pytest.approx(expected, rel=host)
        bound = total(rank, "eagle_host_bound_cycles_total")
        assert bound == (
            count if recorded == 2 else 0 if recorded else sum(v is True for v in columns(4)["host_bound"])
        )
    # Eight different ranks: none is the copy of another.
    assert len({total(rank, "eagle_batch_gap_seconds_total") for rank in ranks}) == 8


def test_fewer_ranks_than_were_recorded_can_be_played(tmp_path: Path) -> None:
    recording = of_three_ranks(tmp_path / "three.json")
    (rank,) = written(tmp_path / "one", 50, recording=recording)
    (plain,) = written(tmp_path / "plain", 50)
    for name in ("eagle_batch_phase_seconds_total", "eagle_batch_gap_seconds_total", "eagle_accepted_tokens_total"):
        assert total(rank, name) == total(plain, name)


def test_traffic_walks_between_neighbouring_batches_by_its_seed() -> None:
    recording = recordings.load()
    batches = [group.batch for group in recording.groups]
    steps = list(islice(traffic(recording, seed=1), 400))
    assert steps == list(islice(traffic(recording, seed=1), 400))
    assert steps != list(islice(traffic(recording, seed=2), 400))
    walked = [batches.index(step.batch) for step in steps if isinstance(step, Group)]
    assert set(walked) == set(range(len(batches)))
    assert all(abs(a - b) <= 1 for a, b in pairwise(walked))
    assert any(isinstance(step, Pause) for step in steps)
    with pytest.raises(ReplayError, match=r"batch 3 is not in the recording \(1, 2, 4, 8, 16\)"):
        traffic(recording, batches=[1, 3])


# --- the process -----------------------------------------------------------------------------------------
def test_liveness_is_the_lock_of_a_running_process(tmp_path: Path) -> None:
    with Replay(tmp_path, ranks=8, speed=0) as replay:
        replay.cycles(20)
        before = ranks_of(tmp_path)
        assert [rank.alive for rank in before] == [True] * 8
        assert total(before[0], "eagle_cycles_total") == 20
        with pytest.raises(ReplayError, match="in use by a running server of the same name"):
            Replay(tmp_path, ranks=8).start()
        assert [(rank.inode, rank.alive) for rank in ranks_of(tmp_path)] == [(rank.inode, True) for rank in before]
        replay.kill()
        after = ranks_of(tmp_path)
        assert [rank.alive for rank in after] == [False] * 8
        assert total(after[0], "eagle_cycles_total") == 20
        with pytest.raises(ReplayError, match="ended"):
            replay.cycles(1)
    with Replay(tmp_path, ranks=2, speed=0):
        again = ranks_of(tmp_path)
        assert [rank.alive for rank in again] == [True] * 2
        assert total(again[0], "eagle_cycles_total") == 0
        assert not {rank.created for rank in again} & {rank.created for rank in before}


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from eagle_exporter.demo.replay import Replay\n"
        "replay = Replay(Path(sys.argv[1]))\nreplay.start()\nprint(replay.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: [rank.alive for rank in ranks_of(tmp_path)] == [False])


def test_cycles_take_their_recorded_time(tmp_path: Path) -> None:
    def played() -> tuple[float, float]:
        (rank,) = ranks_of(tmp_path)
        took = total(rank, "eagle_batch_phase_seconds_total") + total(rank, "eagle_batch_gap_seconds_total")
        return took, total(rank, "eagle_running_requests")

    # The first burst at batch 1 lasts 1.9 s, so there is no pause within half a second at speed 3.
    begin = time.monotonic()
    with Replay(tmp_path, speed=3.0, batches=[1]):
        first, _ = played()
        since = time.monotonic()
        time.sleep(0.5)
        until = time.monotonic()
        last, running = played()
        now = time.monotonic()
    assert running == 1
    longest = 0.05
    assert last <= 3.0 * (now - begin) + longest
    assert last - first >= 3.0 * (until - since) * 0.6


def test_faults_can_be_planted_and_ended_while_it_plays(tmp_path: Path) -> None:
    def verify_seconds(replay: Replay) -> float:
        before = total(ranks_of(tmp_path)[0], "eagle_batch_phase_seconds_total", phase="target_verify")
        replay.cycles(len(rank_columns(4)[0]["rows"]))
        return total(ranks_of(tmp_path)[0], "eagle_batch_phase_seconds_total", phase="target_verify") - before

    with Replay(tmp_path, ranks=3, speed=0, batches=[4]) as replay:
        plain = verify_seconds(replay)
        replay.change(phase_factors={"target_verify": 1.5})
        assert verify_seconds(replay) == pytest.approx(1.5 * plain)
        replay.plant(Faults())
        assert verify_seconds(replay) == pytest.approx(plain)
        replay.change(dead_ranks=(1,))
        ranks = ranks_of(tmp_path)
        assert [rank.alive for rank in ranks] == [True, False, True]
        replay.cycles(1)
        assert total(ranks_of(tmp_path)[0], "eagle_cycles_total") == 1 + total(ranks[0], "eagle_cycles_total")
        assert total(ranks_of(tmp_path)[1], "eagle_cycles_total") == total(ranks[1], "eagle_cycles_total")
        replay.change(dead_ranks=())
        again = ranks_of(tmp_path)
        assert [rank.alive for rank in again] == [True] * 3
        assert total(again[0], "eagle_cycles_total") == 0
        with pytest.raises(ReplayError, match="'verify' is none of draft_steps, target_verify"):
            replay.change(phase_factors={"verify": 2})


def test_an_idle_replay_counts_nothing_and_stays_alive(tmp_path: Path) -> None:
    with Replay(tmp_path, batches=[8]) as replay:
        eventually(lambda: total(ranks_of(tmp_path)[0], "eagle_running_requests") > 0)
        replay.change(idle=True)
        eventually(lambda: total(ranks_of(tmp_path)[0], "eagle_running_requests") == 0)
        (before,) = ranks_of(tmp_path)
        time.sleep(0.3)
        (after,) = ranks_of(tmp_path)
        assert after.alive
        assert total(after, "eagle_cycles_total") == total(before, "eagle_cycles_total")
        assert total(after, "eagle_cycles_excluded_total", reason="no_live_row") == 1
        replay.change(idle=False)
        eventually(lambda: total(ranks_of(tmp_path)[0], "eagle_cycles_total") > total(after, "eagle_cycles_total"))


def test_another_step_count_is_another_configuration_after_a_restart(tmp_path: Path) -> None:
    with Replay(tmp_path, speed=0, batches=[2]) as replay:
        (before,) = ranks_of(tmp_path)
        replay.change(num_steps=2)
        replay.cycles(100)
        (after,) = ranks_of(tmp_path)
    assert after.created != before.created
    assert total(after, "eagle_spec_num_steps") == 2
    assert total(after, "eagle_batch_cycles_total", num_steps="2") == 100
    assert after.value("eagle_accepted_tokens_per_pos_total", "2") is None
    configs = [rank.family("eagle_spec_config_info") for rank in (before, after)]
    assert configs[0] is not None
    assert configs[1] is not None
    assert configs[0].series[0].labels[0] != configs[1].series[0].labels[0]
    draft = total(after, "eagle_batch_phase_seconds_total", phase="draft_steps")
    assert draft == pytest.approx(seconds(columns(2)["phases"]["draft_steps"][:100]) / 2)


def test_a_slow_host_shows_in_its_own_gap_and_in_the_others_draft(tmp_path: Path) -> None:
    # Rank 2 of 4 shows what was recorded of rank 0.
    table = rank_columns(8)[0]
    count = len(table["rows"])
    plain = written(tmp_path / "plain", count, ranks=4, batches=[8])
    faults = Faults(slow_rank=2, host_factor=10.0)
    slow = written(tmp_path / "slow", count, ranks=4, batches=[8], faults=faults)

    def grown(name: str, rank: int, **labels: str) -> float:
        return total(slow[rank], name, **labels) - total(plain[rank], name, **labels)

    gap = grown("eagle_batch_gap_seconds_total", 2)
    assert gap > 0.3
    assert total(slow[2], "eagle_phase_host_seconds_total") == pytest.approx(
        10 * total(plain[2], "eagle_phase_host_seconds_total")
    )
    follow = sum(gap is not None for gap in table["gap"])
    assert total(slow[2], "eagle_host_bound_cycles_total") == follow
    assert total(plain[2], "eagle_host_bound_cycles_total") == sum(value is True for value in table["host_bound"])
    assert grown("eagle_batch_phase_seconds_total", 2) == pytest.approx(0, abs=1e-6)
    for rank in (0, 1, 3):
        assert grown("eagle_batch_phase_seconds_total", rank, phase="draft_steps") == pytest.approx(gap)
        assert grown("eagle_batch_phase_seconds_total", rank, phase="target_verify") == pytest.approx(0, abs=1e-6)
        assert grown("eagle_batch_gap_seconds_total", rank) == 0
        assert grown("eagle_phase_host_seconds_total", rank) == 0
        assert grown("eagle_host_bound_cycles_total", rank) == 0


def test_a_slower_phase_is_slower_in_its_steps_and_parts_too(tmp_path: Path) -> None:
    (plain,) = written(tmp_path / "plain", 100)
    factors = {"draft_steps": 2.0, "verify_overhead": 3.0}
    (slow,) = written(tmp_path / "slow", 100, faults=Faults(phase_factors=factors))
    for phase in catalogue.PHASES:
        name, factor = "eagle_phase_duration_seconds", factors.get(phase, 1.0)
        assert total(slow, name, phase=phase) == pytest.approx(factor * total(plain, name, phase=phase))
    for name, factor in (
        ("eagle_draft_step_seconds_total", 2.0),
        ("eagle_draft_steps_total", 1.0),
        ("eagle_verify_overhead_part_seconds_total", 3.0),
        ("eagle_phase_host_seconds_total", 1.0),
        ("eagle_batch_gap_seconds_total", 1.0),
    ):
        assert total(slow, name) == pytest.approx(factor * total(plain, name)), name
        assert total(slow, name) > 0


def test_acceptance_can_be_scaled(tmp_path: Path) -> None:
    (plain,) = written(tmp_path / "plain", 400)
    recorded = total(plain, "eagle_accepted_tokens_total")
    for factor in (0.0, 0.5, 100.0):
        (rank,) = written(tmp_path / str(factor), 400, faults=Faults(acceptance_factor=factor))
        accepted = total(rank, "eagle_accepted_tokens_total")
        drafts = total(rank, "eagle_drafts_total")
        assert drafts == total(plain, "eagle_drafts_total")
        assert total(rank, "eagle_output_tokens_total") == accepted + drafts
        if factor <= 1:
            assert accepted == pytest.approx(factor * recorded, rel=0.05)
        else:  # every draft that had any accepted token has all of them
            assert accepted == 3 * total(plain, "eagle_accepted_tokens_per_pos_total", position="0")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([], "a JSON object expected"),
        ({"verify": 2}, "there is no verify"),
        ({"phase_factors": 2}, "phase_factors: an object"),
        ({"phase_factors": {"other": -1}}, "other: -1 is no factor"),
        ({"acceptance_factor": "half"}, "acceptance_factor: 'half' is no factor"),
        ({"slow_rank": 64}, "slow_rank: 64 is no number from 0 to 63"),
        ({"num_steps": 0}, "num_steps: 0 is no number from 1"),
        ({"dead_ranks": 1}, "dead_ranks: a list"),
        ({"idle": 1}, "idle: true or false"),
    ],
)
def test_wrong_faults_are_named(faults: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        Faults.parse(faults)


# --- the command -----------------------------------------------------------------------------------------
@contextmanager
def demo(tmp_path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_EXPORTER_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_exporter", "demo", "--replay", "--cache", str(tmp_path), *options],
        cwd=ROOT,
        env={**environment, "EAGLE_EXPORTER_DIR": str(tmp_path / "registry")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_command_plays_a_node_through_the_real_exporter(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('{"num_steps": 2}')
    listen = f"127.0.0.1:{free_port()}"
    options = ("--ranks", "2", "--duration", "1.5", "--prometheus", "none", "--listen", listen)
    with demo(tmp_path, *options, "--faults", str(faults)) as process:
        registry = tmp_path / "registry"
        eventually(lambda: [r.alive for r in ranks_of(registry)] == [True] * 2, timeout=30)
        eventually(lambda: all(r.value("eagle_spec_num_steps") == 2 for r in ranks_of(registry)))
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "on 2 ranks, up " in output
    assert "Played: llama-3-8b-shape on 2 x NVIDIA H200 with tensor parallelism" in output
    assert "No baseline: " in output
    assert "Prometheus  none started: --prometheus none was given" in output
    assert f"http://{listen.replace('127.0.0.1', 'localhost')}/metrics" in output
    assert "target_verify" in output
    assert "recorded cycles seen on /metrics" in output
    # Nothing of it is left that an exporter would show as a dead server.
    assert list(registry.iterdir()) == []


def test_the_commands_that_the_demo_names_work_from_another_shell_and_advise_has_a_baseline(tmp_path: Path) -> None:
    options = ("--speed", "50", "--prometheus", "none", "--listen", f"127.0.0.1:{free_port()}")
    with demo(tmp_path, *options) as process:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, "Ctrl-C ends it.\n"))
        commands = [line.strip() for line in lines if " eagle_exporter " in line or "/eagle-exporter " in line]
        assert [command.split("exporter ")[-1].split()[0] for command in commands] == ["top", "doctor", "advise"]
        assert "Baseline for advise: a decode step of 4.57 ms at batch size 1 (218.6 tokens a second" in "".join(lines)
        advised = ""

        def has_advice() -> bool:
            nonlocal advised
            shell = {"PATH": "/usr/bin:/bin"}
            done = subprocess.run(
                ["sh", "-c", commands[-1]], cwd="/", env=shell, text=True, capture_output=True, check=False
            )
            advised = done.stdout
            assert done.returncode in (0, 1), done.stderr
            return "Batch size 1:" in advised

        eventually(has_advice, timeout=60)
    assert "4.57 ms a token without it, configured" in " ".join(advised.split())


@pytest.mark.parametrize("installed", [True, False])
def test_the_program_that_the_demo_names_is_called_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    python = tmp_path / "a b" / "python"
    python.parent.mkdir()
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "argv", ["/checkout/eagle_exporter/__main__.py"])
    if installed:
        script = python.with_name("eagle-exporter")
        script.touch(mode=0o755)
        assert shlex.split(demo_command._program()) == [str(script)]
    else:
        assert shlex.split(demo_command._program()) == [f"PYTHONPATH={ROOT}", str(python), "-m", "eagle_exporter"]


def test_the_demo_says_what_its_prometheus_is_or_why_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_EXPORTER_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    parser = argparse.ArgumentParser()
    demo_command.add_parser(parser.add_subparsers())

    def said(running: bool, *options: str) -> str:
        args = parser.parse_args(["demo", "--replay", *options])
        demo_command._ReplayDemo(args, threading.Event(), demo_command._Display())._print_urls("first", running)
        return capsys.readouterr().out

    assert "Prometheus  http://localhost:9191   (started for this demo and ends with it; " in said(
        True, "--prometheus-port", "9191"
    )
    assert demo_command.find_prometheus("auto") is None
    assert "none started: no such program on PATH or in the cache" in said(False)
    assert "none started: --prometheus none was given" in said(False, "--prometheus", "none")


def test_the_pauses_of_the_recorded_host_are_found_and_said() -> None:
    recording = recordings.load()
    found = {pause.batch: pause for pause in recording.pauses()}
    for batch in (1, 2, 4, 8, 16):
        gaps = [gap for gap in columns(batch)["gap"] if gap is not None]
        longest = max(gaps)
        assert (batch in found) == (longest > 1_000_000)
        if batch in found:
            pause = found[batch]
            assert pause.seconds == pytest.approx((longest * 1e-9,))
            assert pause.gaps == len(gaps)
            assert pause.usual < 1e-4
    assert set(found) == {2, 8}
    text = " ".join(demo_command.what_is_played(recording, {}))
    assert "69 ms in 1 of 110 gaps of the 2 requests; 64 ms in 1 of 94 gaps of the 8 requests" in text
    groups = tuple(group for group in recording.groups if group.batch == 1)
    assert "pause" not in " ".join(demo_command.what_is_played(replace(recording, groups=groups), {}))


def test_a_baseline_of_the_user_takes_the_place_of_the_recorded_one() -> None:
    text = " ".join(demo_command.what_is_played(recordings.load(), {"1": 0.005}))
    assert "EAGLE_EXPORTER_BASELINE_DECODE_SECONDS" in text
    assert "218.6" not in text


def test_ranks_beyond_the_recorded_ones_and_a_missing_baseline_are_said() -> None:
    two = recordings.load(recordings.shipped(8))
    text = " ".join(demo_command.what_is_played(two, {}, 8))
    assert "on 2 x NVIDIA H200 with tensor parallelism" in text
    assert "2 ranks were recorded. Rank 2 and those after it show the recorded times in turn" in text
    assert "a cycle takes as long as on 2 GPUs" in text
    assert "No baseline" in text
    shares = [sum(value is True for value in rank_columns(batch)[0]["host_bound"]) for batch in (1, 2)]
    one, other = (100 * share / len(columns(batch)["rows"]) for share, batch in zip(shares, (1, 2), strict=True))
    assert f"host in {one:.0f} % of the cycles of 1 request and {other:.0f} % of the cycles of 2 requests." in text
    assert "No baseline" not in " ".join(demo_command.what_is_played(two, {"1": 0.004}, 8))
    assert "were recorded" not in " ".join(demo_command.what_is_played(two, {}, 2))
    single = " ".join(demo_command.what_is_played(recordings.load(recordings.shipped(1)), {}, 1))
    assert "in turn" not in single
    assert "waited for the host" not in single
    assert "No baseline" not in single


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ([], "an object with decode_seconds expected"),
        ({"decode_seconds": {"1": 0.1}}, "does not say how it was measured"),
        ({"decode_seconds": {"7": 0.1}, "source": "x"}, "'7' is none of 1, 2, 3-4"),
        ({"decode_seconds": {"1": 0}, "source": "x"}, "0 is no positive number"),
        ({"decode_seconds": {"1": True}, "source": "x"}, "True is no positive number"),
    ],
)
def test_a_recorded_baseline_is_checked(baseline: Any, message: str) -> None:
    with pytest.raises(RecordingError, match=re.escape(message)):
        recordings.parse({**CONTENT, "baseline": baseline})
    without = {name: value for name, value in CONTENT.items() if name != "baseline"}
    assert recordings.parse(without).baseline == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--tp", "8"), "--tp: not with --replay"), (("--listen", "nowhere"), "HOST:PORT expected")],
)
def test_the_command_refuses_options_that_it_cannot_follow(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with demo(tmp_path, *options) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in errors


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, eagle_exporter.demo.replay\n"
        "heavy = {'torch', 'sglang', 'numpy', 'prometheus_client', 'fastapi', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint('light')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.stdout == "light\n", done.stderr


# --- the file format -------------------------------------------------------------------------------------
def test_the_shipped_recording_is_small_and_holds_real_cycles() -> None:
    recording = recordings.load()
    assert DEFAULT_RECORDING.stat().st_size < 150_000
    assert [group.batch for group in recording.groups] == [1, 2, 4, 8, 16]
    assert sum(len(group.cycles) for group in recording.groups) >= 500


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_more_than_one_rank_are_played_from_a_recording_of_two(ranks: int) -> None:
    path = recordings.shipped(ranks)
    recording = recordings.load(path)
    assert recording.ranks == (1 if ranks == 1 else 2)
    assert path.stat().st_size < 150_000
    # A decode step of one GPU is no baseline of two.
    assert bool(recording.baseline) == (ranks == 1)
    assert ("2 GPUs with tensor parallelism" in recording.description) == (ranks > 1)
    assert [group.batch for group in recording.groups] == [1, 2, 4, 8, 16]


def test_both_recorded_ranks_are_played_as_they_are(tmp_path: Path) -> None:
    tables = rank_columns(4)
    assert tables[0]["phases"] != tables[1]["phases"]
    ranks = written(tmp_path, len(tables[0]["rows"]), ranks=2, batches=[4])
    for table, rank in zip(tables, ranks, strict=True):
        for phase in catalogue.PHASES:
            device, host = (seconds(table[name][phase]) for name in ("phases", "host"))
            assert total(rank, "eagle_batch_phase_seconds_total", phase=phase) == pytest.approx(device, rel=1e-9)
            assert total(rank, "eagle_phase_host_seconds_total", phase=phase) == pytest.approx(host, rel=1e-9)
        assert total(rank, "eagle_host_bound_cycles_total") == sum(value is True for value in table["host_bound"])
        assert total(rank, "eagle_batch_gap_seconds_total") == pytest.approx(seconds(table["gap"]), rel=1e-9)


def change(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(content)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


GROUP = ("groups", 0, "columns")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("groups", 0, "other_ranks"), 1, r'group 0 \(batch 1\): "other_ranks": a list of objects expected'),
        (("groups", 0, "other_ranks", 1, "gap"), None, r"group 0 \(batch 1\): rank 2: column gap is missing"),
        (("groups", 0, "other_ranks", 0, "host", "other", 3), -1, r"rank 1: column host.other, cycle 3: -1 is not"),
        (("groups", 0, "other_ranks", 0, "steps", 3), [1], r"rank 1: cycle 3: 1 draft forwards, 2 expected"),
        (("groups", 1, "other_ranks"), [], r"different numbers of ranks, by batch: \{1: 3, 2: 1, 4: 3"),
    ],
)
def test_what_is_wrong_with_a_further_rank_is_named(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    file = of_three_ranks(tmp_path / "three.json")
    file.write_text(json.dumps(change(json.loads(file.read_text()), path, value)))
    with pytest.raises(RecordingError, match=message):
        recordings.load(file)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "another", 'not a recording: "format"'),
        (("version",), 2, "version 2 of the format; this reads version 1"),
        (("description",), None, '"description"'),
        (("run", "gpu"), None, '"run": gpu missing'),
        (("run", "num_steps"), "3", "\"run\": num_steps is '3'; a whole number expected"),
        (("run", "torch"), 2, '"run": torch is 2; a text expected'),
        (("groups",), [], "at least one group"),
        (("groups", 1, "batch"), 1, "two groups have the same batch"),
        ((*GROUP, "gap"), None, r"group 0 \(batch 1\): column gap is missing"),
        ((*GROUP, "wasted"), [0], r"group 0 \(batch 1\): column wasted has 1 entries for \d+ cycles"),
        ((*GROUP, "phases", "kv_cache", 3), -5, r"column phases.kv_cache, cycle 3: -5 is not allowed"),
        ((*GROUP, "host", "other", 3), 0.5, r"column host.other, cycle 3: 0.5 is not allowed"),
        ((*GROUP, "phases", "other"), None, r"column phases.other is missing"),
        ((*GROUP, "host_bound", 2), 1, r"column host_bound, cycle 2: 1 is not allowed"),
        ((*GROUP, "parts", 2), [1], r"column parts, cycle 2: \[1\] is not allowed"),
        ((*GROUP, "accepted", 2), [4], r"cycle 2: 4 tokens accepted of 3 steps"),
        ((*GROUP, "accepted", 2), [], r"cycle 2: no live row"),
        ((*GROUP, "rows", 2), 3, r"cycle 2: 1 live and 0 wasted rows, but 3 rows"),
        ((*GROUP, "context", 2), [1, 2], r"cycle 2: 1 accept lengths, but 2 context lengths"),
        ((*GROUP, "steps", 2), [1], r"cycle 2: 1 draft forwards, 2 expected"),
    ],
)
def test_what_is_wrong_with_a_recording_is_named(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(change(CONTENT, path, value)))
    with pytest.raises(RecordingError, match=message) as caught:
        recordings.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not a .gzipped. JSON file"),
        (b"\x1f\x8bnothing", "cannot be read|not a .gzipped."),
        (gzip.compress(b"{}", mtime=0)[:-6], "not a .gzipped."),
        (b"[]", "raw list of groups .* convert it first"),
        (b"3", "not a recording"),
    ],
)
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "file.json.gz"
    file.write_bytes(content)
    with pytest.raises(RecordingError, match=message):
        recordings.load(file)
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        recordings.load(tmp_path / "absent")


def raw_groups() -> list[dict[str, Any]]:
    """The list that a GPU run writes."""

    def cycle(number: int, rows: int) -> dict[str, Any]:
        phases = [0.0005, 0.005 + 1e-5 * number, 0.0003, 0.0001, 2e-5, 0.0]
        return {
            "rows": rows,
            "num_steps": 3,
            "num_draft_tokens": 4,
            "wasted": 0,
            "accepted": [number % 4] * rows,
            "context": [100 + number] * rows,
            "host_bound": None if number == 0 else number % 2 == 0,
            "cycle": sum(phases),
            "phases": phases,
            "host": [0.0004] * 6,
            "gap": None if number == 0 else 3e-5,
            "steps": [0.0002, 0.0003] if number % 2 else [],
            "parts": [1e-5, 5e-5, 4e-5] if number == 2 else None,
        }

    return [{"batch": rows, "cycles": [cycle(number, rows) for number in range(5)]} for rows in (4, 1)]


def test_one_command_converts_what_a_gpu_run_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, out = tmp_path / "raw.json.gz", tmp_path / "out.json.gz"
    raw.write_bytes(gzip.compress(json.dumps(raw_groups()).encode()))
    assert recordings.main([str(raw), str(out), "--gpu", "NVIDIA B200", "--sglang", "0.5.23"]) == 0
    assert "10 cycles at batch 1, 4" in capsys.readouterr().out
    first = out.read_bytes()
    assert recordings.main([str(raw), str(out), "--gpu", "NVIDIA B200", "--sglang", "0.5.23"]) == 0
    assert out.read_bytes() == first
    assert first[4:8] == bytes(4), "no time of writing in the gzip header"
    recording = recordings.load(out)
    assert (recording.run.gpu, recording.run.sglang, recording.run.num_steps) == ("NVIDIA B200", "0.5.23", 3)
    assert [group.batch for group in recording.groups] == [1, 4]
    for group, raw_group in zip(recording.groups, reversed(raw_groups()), strict=True):
        for converted, expected in zip(group.cycles, raw_group["cycles"], strict=True):
            assert converted.cycle == pytest.approx(expected["cycle"], abs=5e-9)
            for name in ("accepted", "context", "phases", "host", "steps", "parts"):
                value = getattr(converted, name)
                assert (None if value is None else list(value)) == pytest.approx(expected[name], abs=1e-9)
            assert converted.gap == pytest.approx(expected["gap"], abs=1e-9)
            assert (converted.rows, converted.host_bound) == (expected["rows"], expected["host_bound"])
    (rank,) = written(tmp_path / "registry", 5, batches=[4], recording=out)
    assert total(rank, "eagle_accepted_tokens_total") == 4 * (0 + 1 + 2 + 3 + 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((0, "cycles", 1, "cycle"), 0.5, "group 0: cycle 1: phases sum to"),
        ((0, "cycles", 1, "gap"), -0.5, "-0.5 is no duration"),
        ((1, "cycles", 1, "num_steps"), 2, "one num_steps and num_draft_tokens expected"),
        ((1, "cycles", 1, "host"), None, "group 1: not as a GPU run writes it: KeyError"),
        ((1, "cycles", 1, "rows"), 7, "cycle 1: 1 live and 0 wasted rows, but 7 rows"),
    ],
)
def test_raw_cycles_that_cannot_be_true_are_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[Any, ...], value: Any, message: str
) -> None:
    raw, out = tmp_path / "raw.json", tmp_path / "out.json.gz"
    raw.write_text(json.dumps(change(raw_groups(), path, value)))
    assert recordings.main([str(raw), str(out)]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def raw_ranks() -> list[dict[str, Any]]:
    """What a GPU run writes of two ranks: the second takes 1 ms longer in its draft."""
    groups = raw_groups()
    for group in groups:
        cycles = copy.deepcopy(group["cycles"])
        for cycle in cycles:
            cycle["phases"][0] += 1e-3
            cycle["cycle"] += 1e-3
        group["other_ranks"] = [cycles]
    return groups


def test_a_run_of_several_ranks_is_converted_with_the_times_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw.json.gz", tmp_path / "out.json.gz"
    raw.write_bytes(gzip.compress(json.dumps(raw_ranks()).encode()))
    assert recordings.main([str(raw), str(out)]) == 0
    assert "10 cycles at batch 1, 4, of 2 rank(s)" in capsys.readouterr().out
    recording = recordings.load(out)
    assert recording.ranks == 2
    for group in recording.groups:
        for cycle in group.cycles:
            assert cycle.rank(0) is cycle
            assert cycle.rank(1).phases[0] - cycle.phases[0] == pytest.approx(1e-3)
            assert cycle.rank(1).phases[1:] == cycle.phases[1:]
            assert (cycle.rank(1).gap, cycle.rank(1).steps) == (cycle.gap, cycle.steps)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((0, "other_ranks", 0, 1, "cycle"), 0.5, "group 0: rank 1: cycle 1: phases sum to"),
        ((0, "other_ranks", 0, 1, "accepted"), [0, 0, 0, 0], "group 0: rank 1: cycle 1 is not that of the first rank"),
        ((1, "other_ranks", 0, 4), None, "group 1: rank 1: 4 cycles, 5 of the first rank"),
        ((1, "other_ranks"), None, "different numbers of ranks"),
    ],
)
def test_ranks_that_do_not_fit_together_are_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[Any, ...], value: Any, message: str
) -> None:
    raw, out = tmp_path / "raw.json", tmp_path / "out.json.gz"
    raw.write_text(json.dumps(change(raw_ranks(), path, value)))
    assert recordings.main([str(raw), str(out)]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()
