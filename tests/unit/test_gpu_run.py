"""What the GPU run does that needs no GPU: its arithmetic, its judgements, the switch, and the order of the part tp."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.cli import profile
from eagle_exporter.demo.recording import DEFAULT_RECORDING
from eagle_exporter.demo.replay import write_cycles
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from eagle_exporter.timing.clocks import HostClock
from eagle_exporter.timing.cycle import Acceptance, CycleRecord, PhaseTimes
from tests.gpu import driver, figures, run, summarise, tensor_parallel
from tests.gpu import kernels as captures
from tests.unit.doubles import make_recorder, value

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


# --- the profiler's trace ------------------------------------------------------------------------------------
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
