"""What the GPU run does that needs no GPU: its arithmetic, its judgements, the switch, and the order of the part tp."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.cli import profile
from eagle_exporter.demo.recording import DEFAULT_RECORDING
from eagle_exporter.demo.replay import write_cycles
from eagle_exporter.hooks import plugin
from eagle_exporter.hooks.session import Session
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from eagle_exporter.timing.budget import Budget
from eagle_exporter.timing.clocks import HostClock
from eagle_exporter.timing.cycle import Acceptance, CycleRecord, CycleTimer, PhaseTimes
from tests.gpu import driver, figures, run, summarise, tensor_parallel
from tests.gpu import kernels as captures
from tests.ranks import make_plan
from tests.unit.doubles import HandClock, make_recorder, value
from tests.unit.test_acceptance import Request
from tests.unit.test_session import Batch, Engine, Mode

GPU = Path(__file__).resolve().parents[1] / "gpu"


# --- arithmetic --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("q", "counts", "expected"),
    [
        (0.5, [0, 10, 0, 0], 1.5),
        (0.5, [10, 10, 0, 0], 1.0),
        (0.9, [10, 10, 0, 0], 1.8),
        (0.5, [4, 0, 0, 0], 0.5),
        (0.99, [1, 0, 0, 99], 4.0),  # beyond the last bound PromQL answers the last bound
        (0.5, [0, 0, 0, 0], None),
    ],
)
def test_a_quantile_is_that_of_histogram_quantile(q: float, counts: list[float], expected: float | None) -> None:
    assert figures.quantile(q, [1.0, 2.0, 4.0], counts) == (None if expected is None else pytest.approx(expected))


def test_a_cut_run_leaves_the_last_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "part.json"
    figures.write(path, {"step": 1})
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        figures.write(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}


def of_replay(root: Path, ranks: int, **arguments: Any) -> list[RankSnapshot]:
    write_cycles(root, 60, ranks=ranks, **arguments).server.close()
    found = RegistryReader(root).read().ranks
    return sorted(found, key=lambda rank: int(rank.labels["tp_rank"]))


def test_means_are_the_same_from_the_histograms_and_from_what_every_rank_has(tmp_path: Path) -> None:
    # Recorded on one GPU: the second rank's times are derived from the first one's.
    ranks = of_replay(tmp_path, 2, recording=DEFAULT_RECORDING)
    leader, other = (driver.values_of(rank) for rank in ranks)
    of_leader, of_any = figures.means(leader), figures.rank_means(leader)
    assert of_any["timed"] == of_leader["timed"] == 60
    assert of_any["cycle"] == pytest.approx(of_leader["cycle"])
    for phase in catalogue.PHASES:
        assert of_any["device"][phase] == pytest.approx(of_leader["device"][phase])
        assert of_any["host"][phase] == pytest.approx(of_leader["host"][phase])
        assert of_any["device"][phase] == pytest.approx(figures.rank_means(other)["device"][phase], rel=2e-3)
    assert tuple(catalogue.PHASES) == figures.PHASES


def test_what_is_gained_is_the_difference_of_two_readings() -> None:
    before = {("a_total", ()): 1.0, ("b_total", ("x",)): 2.0}
    after = {("a_total", ()): 4.0, ("b_total", ("x",)): 2.0, ("c_total", ()): 5.0}
    assert driver.gained(before, after) == {("a_total", ()): 3.0, ("c_total", ()): 5.0}


def test_acceptance_is_equal_only_when_drafts_and_tokens_are_those_of_sglang() -> None:
    counted = {
        ("eagle_drafts_total", ()): 6.0,
        ("eagle_accepted_tokens_total", ()): 5.0,
        ("eagle_accepted_tokens_per_pos_total", ("0",)): 3.0,
        ("eagle_accepted_tokens_per_pos_total", ("1",)): 2.0,
    }
    judged = figures.acceptance(counted, [3, 1, 2], 6)
    assert judged["equal"]
    assert judged["per_position"] == judged["sglang_per_position"] == [3.0, 2.0]
    assert not figures.acceptance(counted, [3, 1, 2], 7)["equal"]
    assert not figures.acceptance(counted, [3, 2, 1], 6)["equal"]


# --- judgements --------------------------------------------------------------------------------------------
def known_cards(ranks: int, bus: str = "") -> dict[str, dict[str, str]]:
    return {f"GPU-replay-{rank}": {"index": str(rank), "pci_bus_id": bus} for rank in range(ranks)}


def test_ranks_are_told_apart_by_file_and_by_card(tmp_path: Path) -> None:
    ranks = of_replay(tmp_path, 2)
    judged = tensor_parallel.judge_identity(ranks, 2, known_cards(2))
    assert judged["one_file_per_rank"]
    assert judged["uuids_distinct"]
    assert judged["joinable"]
    assert judged["acceptance_on"] == ["0"]
    assert not tensor_parallel.judge_identity(ranks, 3, known_cards(2))["one_file_per_rank"]
    assert not tensor_parallel.judge_identity(ranks, 2, known_cards(1))["joinable"]
    assert not tensor_parallel.judge_identity(ranks, 2, known_cards(2, "00000000:01:00.0"))["joinable"]
    assert tensor_parallel.judge_identity(ranks, 2, None)["joinable"] is None
    assert not tensor_parallel.judge_identity([ranks[0], ranks[0]], 2, None)["uuids_distinct"]


def change(*, gap: float = 0.0, host: Mapping[str, float] | None = None, **device: float) -> dict[str, Any]:
    """What a fault changed on one rank, in seconds."""
    return {
        "device": {phase: device.get(phase, 0.0) for phase in figures.PHASES},
        "host": {phase: (host or {}).get(phase, 0.0) for phase in figures.PHASES},
        "gap": gap,
        "host_bound_share": 0.0,
    }


def test_a_kernel_before_a_collective_shows_on_every_rank_and_names_none() -> None:
    changes = [change(target_verify=0.5e-3) for _ in range(4)]
    shown = tensor_parallel.judge_plant(changes, 3, 0.5e-3)
    assert shown["slow_rank"] == shown["all_others"] == ["device target_verify"]
    assert not shown["named_by_host_time"]
    assert not shown["named_by_gap"]


def test_a_kernel_after_the_last_collective_shows_in_its_phase_on_its_rank_and_as_waiting_on_the_others() -> None:
    changes = [change(draft_steps=0.5e-3), change(draft_extend=0.5e-3)]
    shown = tensor_parallel.judge_plant(changes, 1, 0.5e-3)
    assert (shown["slow_rank"], shown["all_others"]) == (["device draft_extend"], ["device draft_steps"])


def test_a_slow_host_is_named_by_its_host_time_or_its_gap_only_where_the_others_have_none() -> None:
    inside = [change(draft_steps=8e-3), change(kv_cache=8e-3, host={"kv_cache": 8e-3})]
    assert tensor_parallel.judge_plant(inside, 1, 8e-3)["named_by_host_time"]
    before = [change(draft_steps=8e-3), change(gap=8e-3)]
    assert tensor_parallel.judge_plant(before, 1, 8e-3)["named_by_gap"]
    result = [change(gap=8e-3), change(gap=8e-3)]
    shown = tensor_parallel.judge_plant(result, 1, 8e-3)
    assert shown["slow_rank"] == shown["all_others"] == ["gap"]
    assert not shown["named_by_gap"]


def captured(allreduce: float) -> dict[str, Any]:
    return {"phases": {"target_verify": {"classes": {"gemm": 0.01, "allreduce_nccl": allreduce, "attention": 0.002}}}}


def test_the_rank_with_the_least_allreduce_time_is_the_slow_one() -> None:
    even = [captured(0.001), captured(0.001)]
    assert tensor_parallel.judge_kernels(even, [captured(0.0015), captured(0.001)], 1)["slow_rank_has_the_least"]
    assert not tensor_parallel.judge_kernels(even, [captured(0.001), captured(0.0015)], 1)["slow_rank_has_the_least"]
    assert not tensor_parallel.judge_kernels(even, even, 1)["slow_rank_has_the_least"]


def nccl_entry(proto: str, config_id: str, mean: float) -> dict[str, Any]:
    return {
        "eagle_nccl_config_info": {"version": "2.28", "proto": proto},
        "config_id": config_id,
        "batch1": {"verify_mean": mean},
    }


def test_a_setting_of_nccl_must_be_seen_in_the_info_series_and_make_another_configuration() -> None:
    settings = {"default": nccl_entry("", "a", 0.004), "NCCL_PROTO=Simple": nccl_entry("Simple", "b", 0.005)}
    judged = tensor_parallel.judge_nccl(settings)
    assert judged["info_differs"]
    assert judged["config_id_differs"]
    assert judged["verify_mean_to_default"]["batch1"]["NCCL_PROTO=Simple"] == pytest.approx(1.25)
    unseen = settings | {"NCCL_PROTO=LL": nccl_entry("", "a", 0.004)}
    assert not tensor_parallel.judge_nccl(unseen)["info_differs"]
    assert not tensor_parallel.judge_nccl(unseen)["config_id_differs"]


# --- an engine that is none --------------------------------------------------------------------------------
class StandIn:
    """Answers like `driver.Engine`, and counts what its ranks would count; `speeds` are tok/s by mode."""

    speeds: Mapping[str, float] = {"raw": 100.0, "on": 99.0, "auto": 99.5}

    def __init__(
        self, root: Path, name: str = "tp", ranks: int = 2, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.ranks, self.start_seconds = name, ranks, 0.01
        self.environment = dict(environment or {})
        self.modes = ["on"] * ranks
        self.deaf_rank: int | None = None
        """A rank that does not obey."""
        self.log: list[str] = []
        self.closed = False
        write_cycles(root / name, 60, ranks=ranks).server.close()
        self.root = root / name

    def command(self, **command: Any) -> dict[str, Any]:
        self.log += [f"{key}={value}" for key, value in command.items() if key in ("mode", "plant")]
        if "mode" in command:
            self.modes = [old if rank == self.deaf_rank else command["mode"] for rank, old in enumerate(self.modes)]
        answer = {"mode": command.get("mode"), "sleep_seconds": command.get("calibrate", 0) * 1e-9, "costs": [1e-5]}
        cycle = {"rows": 1, "accepted": [1], "phases": [0.001] * 6}
        return {**answer, "ranks": [{**answer, "records": [cycle] * 3} for _ in range(self.ranks)]}

    def request(self, batch: int, tokens: int) -> dict[str, Any]:
        self.log.append(f"{self.modes[0]}:{batch}")
        full = [driver.values_of(rank) for rank in self.snapshots()]
        gained = [values if mode != "raw" else {} for values, mode in zip(full, self.modes, strict=True)]
        drafts = int(full[0]["eagle_drafts_total", ()])
        accepted = int(full[0]["eagle_accepted_tokens_total", ()])
        return {
            "tok_s": self.speeds[self.modes[0]],
            "tokens_right": True,
            "verify_ct": drafts,
            "histogram": [drafts - accepted // 3, 0, 0, accepted // 3],
            "gained": gained[0],
            "gained_by_rank": gained,
        }

    def snapshots(self) -> list[Any]:
        return sorted(RegistryReader(self.root).read().ranks, key=lambda rank: int(rank.labels["tp_rank"]))

    def close(self) -> None:
        self.closed = True


def test_pairs_are_compared_with_the_raw_run_of_their_round_and_the_order_rotates(tmp_path: Path) -> None:
    engine = StandIn(tmp_path)
    tables: list[dict[str, Any]] = []
    modes = ["raw", "on", "raw#control"]
    table = tensor_parallel.alternate(engine, modes, 1, 8, 3, time.time() + 60, tables.append)
    assert [entry.partition(":")[0] for entry in engine.log if ":" in entry] == [
        *("raw", "on", "raw"),
        *("on", "raw", "raw"),
        *("raw", "raw", "on"),
    ]
    assert [len(t["modes"]["on"]["tok_s"]) for t in tables] == [1, 2, 3], "kept after each round"
    assert (table["modes"]["on"]["ratio_median"], table["modes"]["raw#control"]["ratio_median"]) == (0.99, 1.0)
    assert table["modes"]["on"]["pairs"] == 3
    assert table["modes"]["on"]["hook_us_median_by_rank"] == [10.0, 10.0]
    assert table["modes"]["raw"]["acceptance"] is None
    assert engine.modes == ["on", "on"]


def test_a_round_in_which_one_rank_was_not_switched_is_void(tmp_path: Path) -> None:
    engine = StandIn(tmp_path)
    engine.deaf_rank = 1
    table = tensor_parallel.alternate(engine, ["raw", "on"], 1, 8, 2, time.time() + 60)
    assert table["modes"] == {}
    assert len(table["void_rounds"]) == 2
    assert "the ranks counted [0.0, 60.0] cycles" in table["void_rounds"][0]


def test_a_round_is_void_where_raw_counted_or_a_cycle_was_not_timed(tmp_path: Path) -> None:
    result = StandIn(tmp_path).request(1, 8)
    assert tensor_parallel.void_reason({"on": result}) == ""
    assert tensor_parallel.void_reason({"raw": result}) == "raw: 60 cycles counted"
    untimed = [
        {key: value for key, value in gained.items() if key[0] != "eagle_batch_timed_cycles_total"}
        for gained in result["gained_by_rank"]
    ]
    assert "were timed" in tensor_parallel.void_reason({"on": {**result, "gained_by_rank": untimed}})
    assert tensor_parallel.void_reason({"auto": {**result, "gained_by_rank": untimed}}) == ""


TREE = "NCCL_ALGO=ring,tree;allreduce:tree"
PLAN = tensor_parallel.Plan(
    pairs={1: (2, 8)},
    acceptance=((1, 8),),
    planted_tokens=8,
    recording=((1, 8),),
    nccl=({"NCCL_PROTO": "Simple"}, {"NCCL_ALGO": "ring,tree;allreduce:tree"}),
    nccl_requests=((1, 8),),
)


def run_part(
    tmp_path: Path, budget: float = 1000.0, change_engine: Callable[[StandIn], None] = lambda engine: None
) -> tuple[dict[str, Any], list[dict[str, Any]], list[StandIn]]:
    engines: list[StandIn] = []
    saved: list[dict[str, Any]] = []
    report: dict[str, Any] = {}

    def start(name: str, environment: dict[str, str]) -> StandIn:
        engines.append(StandIn(tmp_path, name, environment=environment))
        change_engine(engines[-1])
        return engines[-1]

    def save() -> None:
        saved.append(json.loads(json.dumps(report, default=str)))

    tensor_parallel.run(start, tmp_path, budget, report, save, plan=PLAN)
    return report, saved, engines


@pytest.fixture
def without_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "_capture", lambda _engine, rank, *_: captured(0.002 - 0.001 * rank))


@pytest.mark.usefixtures("without_captures")
def test_all_steps_run_and_each_is_kept_as_soon_as_it_is_done(tmp_path: Path) -> None:
    report, saved, engines = run_part(tmp_path)
    steps = ["identity", "acceptance", "planted", "nccl", "cost_batch1", "recording", "kernels"]
    assert list(report["steps"]) == [*steps, "NCCL_PROTO=Simple", TREE]
    assert all("error" not in step for step in report["steps"].values()), report["steps"]
    seen = [[step for step in steps if step in state] for state in saved]
    assert all(len(later) - len(earlier) <= 1 for earlier, later in pairwise(seen))
    assert seen[-1] == steps
    assert list(report["nccl"]) == ["default", "NCCL_PROTO=Simple", TREE]
    assert [engine.environment for engine in engines] == [{}, *PLAN.nccl]
    assert all(engine.closed for engine in engines)
    assert report["kernels"]["judged"]["slow_rank_has_the_least"]
    assert (tmp_path / "recording_tp2.json.gz").exists()


@pytest.mark.usefixtures("without_captures")
def test_a_step_that_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "planted", lambda *_: 1 / 0)
    report, _, engines = run_part(tmp_path)
    assert report["steps"]["planted"]["error"] == "ZeroDivisionError: division by zero"
    assert "planted" not in report
    assert [name for name, step in report["steps"].items() if "error" in step] == ["planted"]
    assert {"cost_batch1", "recording", "kernels"} <= report.keys()
    assert all(engine.closed for engine in engines)


@pytest.mark.usefixtures("without_captures")
def test_settings_for_which_no_time_is_left_are_named_and_not_begun(tmp_path: Path) -> None:
    report, _, engines = run_part(tmp_path, budget=5.0)
    assert len(engines) == 1
    assert list(report["nccl"]) == ["default"]
    assert "not run" in report["steps"][TREE]["error"]


@pytest.mark.usefixtures("without_captures")
def test_a_later_start_that_takes_less_leaves_time_for_one_more_setting(tmp_path: Path) -> None:
    def slow_start(engine: StandIn) -> None:
        engine.start_seconds = 1000.0 if engine.name == "tp" else 0.01

    report, _, engines = run_part(tmp_path, budget=75.0, change_engine=slow_start)
    assert [engine.name for engine in engines] == ["tp", "tp-nccl1", "tp-nccl2"]
    assert "error" not in report["steps"][TREE]


def test_no_setting_of_nccl_leaves_the_gathering_of_the_logits_without_an_algorithm() -> None:
    for setting in tensor_parallel.NCCL_SETTINGS:
        for_all, *_ = setting.get("NCCL_ALGO", "ring").lower().split(";")
        assert "ring" in for_all.split(",")


# --- parts of one GPU --------------------------------------------------------------------------------------
def test_a_step_of_a_part_that_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "stamp", dict)
    part = run.Part(tmp_path, "big", SimpleNamespace(start_seconds=1.0))  # type: ignore[arg-type]
    part.take("planted", lambda: 1 / 0)
    part.take("truth", lambda batch: {"batch": batch}, 16)
    written = json.loads((tmp_path / "big.json").read_text())
    assert written["steps"]["planted"]["error"] == "ZeroDivisionError: division by zero"
    assert "planted" not in written
    assert written["truth"] == {"batch": 16}
    assert "error" not in written["steps"]["truth"]


def test_the_speed_of_an_engine_that_was_never_captured_is_measured_before_its_first_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StandIn(tmp_path, "kernels", ranks=1)
    verify = {"seconds": 2e-3, "busy_seconds": 1e-3, "kernel_seconds": 1e-3, "kernels": 2, "classes": {"gemm": 1e-3}}
    result = {
        "cycles": 1,
        "rows": {"min": 1, "max": 1},
        "stall_seconds": {"stop": 0.1},
        "trace_bytes": 1,
        "phases": {"target_verify": verify},
        "unclassified": [],
        "top": [],
        "problems": [],
    }

    def capture(_arguments: Any) -> tuple[dict[str, Any], Path]:
        engine.log.append("capture")
        return result, tmp_path

    monkeypatch.setattr(profile, "capture", capture)
    monkeypatch.setattr(captures, "_REQUEST_SECONDS", 0.0)
    report: dict[str, Any] = {}
    captures.run(engine, tmp_path, report, lambda: None, deadline=time.time() + 600, batches={1: 8, 16: 8}, rounds=1)
    before = engine.log[: engine.log.index("capture")]
    assert [entry for entry in before if entry.startswith("on:")] == ["on:1"] * captures.NEVER + [
        "on:16"
    ] * captures.NEVER
    for batch in (1, 16):
        cost = report["steps"][f"cost_batch{batch}"]
        assert cost["never_captured_tok_s"] == [99.0] * captures.NEVER
        assert cost["after_over_never"] == 1.0
        assert len(cost["rounds"]) == 1


def test_what_takes_too_long_raises() -> None:
    with pytest.raises(TimeoutError, match="the start"), driver.limited(0.05, "the start"):
        time.sleep(30)
    with driver.limited(0.2, "a request"):
        pass
    time.sleep(0.3)  # the limit is gone with the block


def test_a_part_without_a_gpu_does_not_get_among_the_results(tmp_path: Path) -> None:
    (tmp_path / "tp2.json").write_text(json.dumps({"ranks": 2, "cost_batch1": {}}))
    (tmp_path / "tp4.json").write_text(json.dumps({"ranks": 4, "gpu": "NVIDIA H200"}))
    results = tmp_path / "results" / "results.json"
    results.parent.mkdir()
    assert summarise.main([str(tmp_path), str(results)]) == 0
    assert list(json.loads(results.read_text())) == ["tp4"]


# --- the switch --------------------------------------------------------------------------------------------
@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The plugin's module, as a rank's process has it, obeying a file of this test."""
    monkeypatch.setenv("EAGLE_GPU_SWITCH", str(tmp_path / "switch"))
    spec = importlib.util.spec_from_file_location("eagle_gpu_switch", GPU / "switch_plugin" / "eagle_gpu_switch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scheduler_of(rank: int) -> Any:
    return SimpleNamespace(
        ps=SimpleNamespace(tp_rank=rank), draft_worker=None, tp_worker=SimpleNamespace(model_runner=SimpleNamespace())
    )


def engine_of(tmp_path: Path, ranks: int) -> driver.Engine:
    engine = driver.Engine.__new__(driver.Engine)
    engine.switch, engine.sequence, engine.ranks = tmp_path / "switch", 0, ranks
    return engine


def test_a_command_returns_only_when_every_rank_has_obeyed(tmp_path: Path, switch: ModuleType) -> None:
    engine = engine_of(tmp_path, 2)
    obeyed = threading.Event()

    def second_rank() -> None:
        while not (tmp_path / "switch.done.0").exists():
            switch._obey(scheduler_of(0))
            time.sleep(0.005)
        time.sleep(0.2)
        obeyed.set()
        switch.State.sequence = -1  # rank 1 is another process
        switch._obey(scheduler_of(1))

    thread = threading.Thread(target=second_rank)
    thread.start()
    answer = engine.command(mode="raw")
    thread.join()
    assert obeyed.is_set()
    assert [(one["rank"], one["mode"]) for one in answer["ranks"]] == [(0, "raw"), (1, "raw")]


def test_a_fault_is_planted_on_the_named_ranks_only(tmp_path: Path, switch: ModuleType) -> None:
    for rank, planted in ((0, ""), (1, "kv_cache")):
        (tmp_path / "switch").write_text(
            json.dumps({"sequence": 5 + rank, "plant": "kv_cache", "plant_ranks": [1], "plant_seconds": 0.5})
        )
        switch._obey(scheduler_of(rank))
        assert (switch.State.plant, switch.State.plant_seconds) == (planted, 0.5)


def test_a_rank_that_fails_or_stays_in_another_mode_makes_the_command_fail(tmp_path: Path, switch: ModuleType) -> None:
    (tmp_path / "switch").write_text(json.dumps({"sequence": 1, "mode": "raw"}))
    switch._obey(SimpleNamespace(ps=SimpleNamespace(tp_rank=1)))  # has no workers
    failed = json.loads((tmp_path / "switch.done.1").read_text())
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*AttributeError"):
        driver.joined([{"mode": "raw"}, failed])
    with pytest.raises(RuntimeError, match=r"different modes: \['raw', 'on'\]"):
        driver.joined([{"mode": "raw"}, {"mode": "on"}])


def test_an_engine_of_which_a_process_ended_is_not_waited_for(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 1)
    engine._processes = [SimpleNamespace(name="scheduler", exitcode=None)]
    engine._check()
    engine._processes = [SimpleNamespace(name="scheduler", exitcode=-11)]
    with pytest.raises(RuntimeError, match=r"ended with \{'scheduler': -11\}"):
        engine.command(mode="on")
    assert not (tmp_path / "switch").exists()


def test_an_engine_that_failed_a_request_is_not_asked_again(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 1)
    with pytest.raises(RuntimeError, match="a request failed: OSError: gone"), engine._or_dead():
        raise OSError("gone")
    with pytest.raises(RuntimeError, match="a request failed: OSError: gone"):
        engine.request(1, 8)


def test_multicast_stays_off_where_it_must(switch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag"
    for end in range(1, len(name.split(".")) + 1):
        package = ModuleType(".".join(name.split(".")[:end]))
        monkeypatch.setitem(sys.modules, package.__name__, package)
    gatherer = type("MultimemAllGatherer", (), {"_build": lambda _self, _x: "a multicast buffer"})
    vars(sys.modules[name])["MultimemAllGatherer"] = gatherer
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    switch._keep_multicast_off()
    assert gatherer()._build(None) == "a multicast buffer"
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", driver.NO_MULTICAST["TORCH_SYMM_MEM_DISABLE_MULTICAST"])
    switch._keep_multicast_off()
    assert gatherer()._build(None) is None


def test_offsets_are_read_of_slots_that_are_given_back_while_others_run(switch: ModuleType) -> None:
    clock = HostClock(slots=2, marks=4)
    offsets = switch.Offsets(clock)
    slots = []
    for number in (0, 1):
        slot = clock.acquire()
        assert slot is not None
        slots.append(slot)
        clock.mark(slot, 1_000_000_000)
        clock.mark(slot, 1_000_000_000 + (number + 1) * 1_000_000)
        offsets.watch(slot, number)
    clock.release(slots[0])
    again = clock.acquire()
    assert again is slots[0]
    found = offsets.finish()
    assert found == {0: pytest.approx([0.0, 1e-3]), 1: pytest.approx([0.0, 2e-3])}
    clock.release(again)
    assert clock.acquire() is again


def test_what_is_recorded_is_what_the_recorder_was_given(switch: ModuleType, tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path)
    session = SimpleNamespace(recorder=recorder)
    switch._start_recording(session)
    taken = PhaseTimes(cycle=0.006, phases=[0.001] * 6, host=[0.002] * 6, gap=1e-5)
    recorder.add_cycle(CycleRecord(2, 3, 4), Acceptance((1, 0), (9, 7)), taken)
    recorder.add_cycle(CycleRecord(1, 3, 4), Acceptance(excluded="no_live_row"), None)
    (only,) = switch.State.records
    assert (only["rows"], only["accepted"], only["context"]) == (2, [1, 0], [9, 7])
    assert (only["phases"], only["host"], only["gap"]) == (taken.phases, taken.host, 1e-5)
    assert value(recorder, "eagle_drafts_total") == 2, "the recorder still counts"
    switch._start_recording(session)
    assert switch.State.records == []
    recorder.add_cycle(CycleRecord(1, 3, 4), Acceptance((2,), (9,)), taken)
    assert len(switch.State.records) == 1


def test_every_place_of_a_fault_that_the_part_tp_uses_exists(switch: ModuleType, tmp_path: Path) -> None:
    engine = StandIn(tmp_path)
    tensor_parallel.planted(engine, 8)
    used = {entry.partition("=")[2] for entry in engine.log if entry.startswith("plant=")} - {""}
    assert used <= switch.PLANTS.keys()
    assert {"target_verify", "after_draft_extend", "kv_cache", "before_cycle", "result"} == used


# --- modes that take turns ---------------------------------------------------------------------------------
class Everyone(HandClock):
    """The time of the outline engine, which the clock of every mode keeps too."""

    def __init__(self) -> None:
        super().__init__(40, 64)
        self.others: list[HandClock] = []

    def another(self, _name: str = "") -> HandClock:
        clock = HandClock(40, 64)
        clock.now = self.now
        self.others.append(clock)
        return clock

    def advance(self, seconds: float) -> None:
        for clock in self.others:
            clock.advance(seconds)
        super().advance(seconds)


class Serving:
    """The outline scheduler and worker, in which modes take turns.

    Attributes:
        up: The hooks are attached.
        modes: Mode that each decode cycle was launched in.
        lost: Cycles of modes that count, which were in flight at a switch.
    """

    def __init__(
        self,
        tmp_path: Path,
        switch: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        modes: list[str],
        cycles: int,
        settle: int,
        *,
        overlap: bool = False,
    ) -> None:
        self.time = Everyone()
        monkeypatch.setattr(plugin, "make_clock", self.time.another)
        self.state, self.overlap = switch.State, overlap
        self.recorder = make_recorder(tmp_path, make_plan(tiers=(0, 3)))
        session = Session()
        self.hooked, self.bare = Engine(session, self.time), Engine(Session(), self.time)
        budget = Budget(1)
        session.start(CycleTimer(self.time, self.recorder, budget), self.recorder, budget, None, recording=True)
        self.up = True
        patch = SimpleNamespace(redo=lambda: setattr(self, "up", True))
        hooks = SimpleNamespace(patches=[patch], undo=lambda: setattr(self, "up", False))
        monkeypatch.setattr(plugin, "active", [(session, hooks)])
        self.turns = switch.Turns(session, hooks, modes, cycles, settle)
        switch.State.turns = self.turns
        self.modes: list[str] = []
        self.lost = 0
        self._in_flight: deque[tuple[Batch, Any]] = deque()

    def iterate(self, batch: Batch | None) -> None:
        """One iteration of the scheduler's loop, with the results one iteration later where they overlap."""
        now, before, switches = self.time.now, self.state.mode, self.turns._switches
        for clock in (self.time, *self.time.others):
            clock.executed = now if self.overlap else math.inf
        self.turns.see(batch)
        if self.turns._switches != switches and self._in_flight and before != "raw":
            self.lost += 1
        engine = self.hooked if self.up else self.bare
        if batch is not None:
            if not batch.forward_mode.is_extend():
                self.modes.append(self.state.mode)
            self._in_flight.append((batch, engine.generate(engine, batch)))
        while len(self._in_flight) > (self.overlap and batch is not None):
            engine.process(engine, *self._in_flight.popleft())

    def decode(self, cycles: int, rows: int = 1) -> None:
        batch = Batch([Request(str(row)) for row in range(rows)])
        for _ in range(cycles):
            self.iterate(batch)

    def done(self) -> list[tuple[int, str]]:
        return [(block["round"], block["mode"]) for block in self.turns.blocks]


Take = Callable[..., Serving]


@pytest.fixture
def serving(tmp_path: Path, switch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Take:
    return partial(Serving, tmp_path, switch, monkeypatch)


def test_modes_take_turns_there_and_back_and_the_order_rotates(serving: Take) -> None:
    engine = serving(["raw", "on", "auto"], 3, 1)
    engine.decode(2 * 6 * 3 + 1)
    assert engine.done() == [
        *((0, mode) for mode in ("raw", "on", "auto", "auto", "on", "raw")),
        *((1, mode) for mode in ("on", "auto", "raw", "raw", "auto", "on")),
    ]
    launched = ["raw", "on", "auto", "auto", "on", "raw", "on", "auto", "raw", "raw", "auto", "on", "auto"]
    assert engine.modes == [mode for mode in launched for _ in range(3)][: len(engine.modes)]
    assert all(block["rows"] == 1 and block["seconds"] > 0 for block in engine.turns.blocks)
    assert all(0 < block["typical_seconds"] < 3 * block["seconds"] for block in engine.turns.blocks)


@pytest.mark.parametrize("between", ["prefill", "idle", "rows"])
def test_a_round_is_void_where_something_else_than_decoding_comes_between(serving: Take, between: str) -> None:
    engine = serving(["raw", "on"], 3, 1)
    engine.decode(3 * 3 + 2)  # three blocks, and a part of the fourth
    if between == "rows":
        engine.decode(2, rows=2)  # this block had two numbers of rows; the next begins with its last batch
        engine.decode(4 * 3, rows=2)
    else:
        engine.iterate(None if between == "idle" else Batch([Request()], Mode("extend")))
        engine.iterate(None)
        engine.decode(4 * 3 + 1)
    assert engine.done() == [
        *((0, mode) for mode in ("raw", "on", "on")),
        *((1, mode) for mode in ("on", "raw", "raw", "on")),
    ]
    assert figures.compare_blocks(engine.turns.blocks, ["raw", "on"], 2 if between == "rows" else 1)["rounds"] == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_cycles_in_flight_at_a_switch_raise_nothing_count_nowhere_and_leak_no_slot(
    serving: Take, switch: ModuleType, overlap: bool
) -> None:
    switch.State.automatic = Budget()
    switch.State.automatic.sample_every = 3
    engine = serving(["raw", "on", "raw#control", "auto"], 20, 8, overlap=overlap)
    for cycles in (8 * 20, 130, 75, 8 * 20 * 3):
        engine.iterate(Batch([Request()], Mode("extend")))
        engine.decode(cycles)
        for _ in range(3):
            engine.iterate(None)
    turns, recorder = engine.turns, engine.recorder
    assert {mode for _, mode in engine.done()} == {"raw", "on", "raw#control", "auto"}
    assert switch._end_turns() == "on"
    taken = turns.take()
    counting = sum(mode != "raw" for mode in engine.modes)
    assert sum(cycles for mode, cycles in taken["launched"].items() if mode != "raw") == counting
    assert value(recorder, "eagle_cycles_total") == counting - engine.lost
    assert (engine.lost > 10) == overlap
    assert value(recorder, "eagle_batch_timed_cycles_total", "1", "3") < counting, "auto times some cycles only"
    for hook in catalogue.HOOKS:
        assert value(recorder, "eagle_hook_errors_total", hook) in (0.0, pytest.approx(math.nan, nan_ok=True)), hook
    assert {reason: value(recorder, "eagle_cycles_dropped_total", reason) for reason in catalogue.DROPPED_REASONS} == (
        dict.fromkeys(catalogue.DROPPED_REASONS, 0.0)
    )
    assert [clock.free for clock in engine.time.others] == [40, 40]
    assert taken["sampling"]["on"] == 1
    assert turns._sides["auto"].budget is switch.State.automatic
    assert taken["block_costs"].keys() == {"on", "auto"}


def test_steps_inside_a_draft_graph_that_were_not_read_before_a_switch_are_given_up(serving: Take) -> None:
    engine = serving(["on", "raw"], 20, 8)
    engine.decode(5)
    session, _ = plugin.active[0]
    events: Any = SimpleNamespace(unread=("a cycle", []), capturing=None, collect=lambda *_, **__: None)
    session.graph_events = events
    engine.decode(16)
    assert engine.done() == [(0, "on")]
    assert events.unread is None


def test_turns_that_fail_do_not_end_the_scheduler_and_whoever_wants_the_blocks_is_told(
    serving: Take, switch: ModuleType, tmp_path: Path
) -> None:
    engine = serving(["raw", "on"], 3, 1)
    engine.turns.see(SimpleNamespace(forward_mode=None))
    assert switch.State.turns is None
    (tmp_path / "switch").write_text(json.dumps({"sequence": 1, "take_blocks": True}))
    switch._obey(scheduler_of(0))
    assert "AttributeError" in json.loads((tmp_path / "switch.done.0").read_text())["error"]


def test_the_mode_before_is_in_force_again_after_the_turns(serving: Take, switch: ModuleType, tmp_path: Path) -> None:
    engine = serving(["raw", "on"], 3, 1)
    switch._end_turns()
    engine.state.mode = "raw"
    wanted = {"modes": ["on", "auto"], "cycles": 3, "settle": 1}
    commands: list[dict[str, Any]] = [{"interleave": wanted}, {"take_blocks": True}, {"interleave": False}]
    answers = []
    for sequence, command in enumerate(commands):
        if sequence == 1:
            engine.turns = switch.State.turns
            engine.decode(7)
        (tmp_path / "switch").write_text(json.dumps({"sequence": 10 + sequence, **command}))
        switch._obey(scheduler_of(0))
        answers.append(json.loads((tmp_path / "switch.done.0").read_text()))
    assert [answer.get("error") for answer in answers] == [None] * 3
    assert [block["mode"] for block in answers[1]["blocks"]] == ["on", "auto"]
    assert (answers[2]["mode"], engine.up, switch.State.turns) == ("raw", False, None)


def blocks_of(rows: int, **rounds: list[tuple[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "mode": mode,
            "round": int(number[1:]),
            "rows": rows,
            "seconds": microseconds * 1e-6,
            "typical_seconds": microseconds * 0.5e-6,
        }
        for number, blocks in rounds.items()
        for mode, microseconds in blocks
    ]


def test_blocks_are_compared_within_their_round_and_a_drift_cancels() -> None:
    # The cycles get longer by 100 us a block, and `on` costs 10 us.
    blocks = blocks_of(
        1,
        r0=[("raw", 1000), ("on", 1110), ("on", 1210), ("raw", 1300)],
        r1=[("on", 1410), ("raw", 1500), ("raw", 1600), ("on", 1710)],
        r2=[("raw", 5000), ("on", 9000), ("on", 9000)],
    )
    report = figures.compare_blocks(
        [*blocks, *blocks_of(2, r3=[("raw", 1), ("on", 9), ("on", 9), ("raw", 1)])], ["raw", "on"], 1
    )
    assert (report["rounds"], report["rounds_left_out"]) == (2, 2)
    on = report["modes"]["on"]
    assert on["cycle_us"] == [1160.0, 1560.0]
    assert (on["more_us_median"], on["more_us_ci95"]) == (10.0, [10.0, 10.0])
    assert on["ratio_median"] == pytest.approx((1150 / 1160 + 1550 / 1560) / 2, abs=1e-5)
    assert on["ratio_ci95"] == [pytest.approx(1150 / 1160, abs=1e-5), pytest.approx(1550 / 1560, abs=1e-5)]
    assert report["modes"]["raw"]["ratio_ci95"] == [1.0, 1.0]
    assert figures.compare_blocks(blocks[:3], ["raw", "on"], 1)["modes"] == {}
    typical = figures.compare_blocks(blocks, ["raw", "on"], 1, "typical_seconds")["modes"]["on"]
    assert typical["more_us_median"] == 5.0


class Taking(StandIn):
    """Answers with blocks; `rounds` whole ones per request, and the last request's tokens are wrong."""

    rounds = 2
    died = ""

    def command(self, **command: Any) -> dict[str, Any]:
        self.log += [f"{key}={value}" for key, value in command.items() if key in ("interleave", "take_blocks")]
        answer = super().command(**command)
        if command.get("take_blocks"):
            served = sum(":" in entry and "interleave" not in entry for entry in self.log) - 1
            there = [("raw", 1000.0), ("on", 1020.0), ("auto", 1005.0)]
            whole: dict[str, Any] = {f"r{number}": [*there, *there[::-1]] for number in range(served * self.rounds)}
            answer |= {
                "blocks": blocks_of(1, **whole),
                "block_costs": {"on": [2e-5, 3e-5], "auto": [1e-5]},
                "launched": {"raw": 100, "on": 100, "auto": 90},
                "switches": 12,
                "sampling": {"on": 1, "auto": 2},
            }
        return answer

    def request(self, batch: int, tokens: int) -> dict[str, Any]:
        return {**super().request(batch, tokens), "tokens_right": tokens == 8}


def test_modes_that_take_turns_are_reported_with_their_costs_and_wrong_outputs(tmp_path: Path) -> None:
    engine = Taking(tmp_path, ranks=1)
    # At 100 tok/s three seconds hold at most 300 tokens, so a request of 400 would be shortened, and none follows.
    report = run.interleaved(engine, ["raw", "on", "auto"], 1, 3.0, time.time() + 60, tokens=400)  # type: ignore[arg-type]
    assert [entry for entry in engine.log if "interleave" in entry][-1] == "interleave=False"
    assert (report["modes"]["on"]["ratio_median"], report["modes"]["on"]["more_us_median"]) == (0.98039, 20.0)
    assert (report["modes"]["on"]["hook_us_median"], report["modes"]["raw"]["hook_us_median"]) == (25.0, None)
    assert report["wrong_outputs"] == report["requests"] >= 1
    assert report["modes"]["auto"]["rounds"] == 2 * report["requests"]
    assert report["typical"]["on"]["more_us_median"] == 10.0
    assert report["launched_cycles"] == {"on": 100, "auto": 90}
    engine.rounds = 0
    with pytest.raises(RuntimeError, match="no whole round"):
        run.interleaved(engine, ["raw", "on", "auto"], 1, 3.0, time.time() + 60, tokens=400)  # type: ignore[arg-type]


def trace_of(cycles: int, *, span_us: float) -> list[dict[str, Any]]:
    """A profiler's events: in each cycle one kernel of the verify, launched in its range."""
    events: list[dict[str, Any]] = []
    for cycle in range(cycles):
        begin = cycle * 1000.0
        name = f"eagle:{cycle}:{figures.PHASES.index('target_verify')}"
        events += [
            {"cat": "user_annotation", "name": name, "ts": begin, "dur": 50.0},
            {"cat": "cuda_runtime", "ts": begin + 10, "dur": 5.0, "args": {"correlation": cycle}},
            {"cat": "kernel", "ts": begin + 100, "dur": span_us, "args": {"correlation": cycle}},
        ]
    return events


@pytest.mark.parametrize(("busy", "cycles", "error_us", "left_out"), [(4, 4, 1.0, 6), (3, 10, 1.0 + 20.0 * 7 / 10, 0)])
def test_cycles_in_which_the_device_waited_are_not_compared_with_the_trace_where_others_are_enough(
    tmp_path: Path, busy: int, cycles: int, error_us: float, left_out: int
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace_of(12, span_us=500.0)}))
    records: list[dict[str, Any]] = []
    for number in range(12):
        waited = number >= 2 + busy
        phases = [0.0] * len(figures.PHASES)
        phases[figures.PHASES.index("target_verify")] = 501e-6 + 20e-6 * waited
        records.append({"phases": phases, "host_bound": waited})
    report = run.compare_with_trace(str(path), records)
    verify = report["phases"]["target_verify"]
    assert (verify["cycles"], report["host_bound_left_out"], report["all_cycles"]) == (cycles, left_out, not left_out)
    assert verify["error_us"] == pytest.approx(error_us)
