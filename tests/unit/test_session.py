from __future__ import annotations

import gc
import inspect
import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from eagle_exporter import catalogue, control
from eagle_exporter.control import Control
from eagle_exporter.hooks import points, session
from eagle_exporter.hooks.session import FLUSH_NS, FLUSH_RESULTS, FLUSH_ROWS, LOOK_EVERY, RECORD, Session
from eagle_exporter.timing import cycle
from eagle_exporter.timing.budget import FUSE_ERRORS, Budget
from eagle_exporter.timing.clocks import CudaEventClock, DriverEventClock, HostClock, SyncClock
from eagle_exporter.timing.cycle import CycleTimer
from tests.ranks import make_plan
from tests.unit.doubles import HandClock, Observed, histogram, make_recorder, value
from tests.unit.test_acceptance import Request

EVERY_FAMILY = (*points.FAMILIES, points.GENERIC, points.PLAIN, points.STAGE)
ROLES = sorted({point.role for family in EVERY_FAMILY for point in family.points})


class Mode:
    """What the hooks ask of SGLang's ``ForwardMode``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name == "extend"

    def is_idle(self) -> bool:
        return self.name == "idle"


@dataclass
class Batch:
    """What the hooks read of SGLang's ``ScheduleBatch``."""

    reqs: list[Request]
    forward_mode: Mode = field(default_factory=lambda: Mode("decode"))
    is_extend_in_batch: bool = False
    spec_info: Any = None


class Engine:
    """SGLang's V2 worker in outline: the same functions in the same order, each taking a known time.

    Attributes:
        calls: Names of SGLang's own functions, in the order they ran.
        raising: Function of SGLang that raises.
        ending: Ids of the requests that end with the next result.
        coordinated: Ranks with other work than a prefill do it beside a prefill.
        drafts_ahead: The last stage of a pipeline: the next cycle is drafted at the end of this one.
    """

    SECONDS: ClassVar[dict[str, float]] = {
        "kv_prepare": 0.001,
        "before_draft": 0.0001,
        "forward": 0.002,
        "organise": 0.0003,
        "tree_build": 0.0005,
        "prepare": 0.0006,
        "between": 0.0002,
        "target_verify": 0.020,
        "sample": 0.0007,
        "kv_compact": 0.0008,
        "draft_extend": 0.003,
        "target_prefill": 0.050,
        "allocation": 0.0,
    }

    def __init__(self, session: Session, clock: HandClock, *, num_steps: int = 3, topk: int = 1) -> None:
        self.clock = clock
        self.calls: list[str] = []
        self.raising = ""
        self.ending: set[str] = set()
        self.coordinated = False
        self.drafts_ahead = self.drafted = False
        self.speculative_num_steps = num_steps
        self.speculative_num_draft_tokens = num_steps + 1
        self.topk = topk
        self.accepted: list[int] = []

        def wrap(role: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return session.wrapper(role)(function)

        self.kv_prepare = wrap("kv_prepare", lambda: self.work("kv_prepare"))
        self.model_forward = wrap("draft_step", lambda: self.work("forward"))
        self.draft_forward = wrap("draft", self._draft_forward)
        self.tree_build = wrap("tree_build", lambda: self.work("tree_build"))
        self.prepare = wrap("prepare", lambda: self.work("prepare"))
        self.sample = wrap("sample", lambda: self.work("sample"))
        self.kv_compact = wrap("kv_compact", lambda: self.work("kv_compact"))
        self.draft_extend = wrap("draft_extend", lambda: self.work("draft_extend"))
        self.target_forward = wrap("target_verify", self._target_forward)
        self.verify = wrap("verify", Engine._verify)
        self.generate = wrap("cycle", Engine._generate)
        self.allocate = wrap("kv_allocation", lambda: self.work("allocation"))
        self.process = wrap("accept", Engine._process)
        self.plan = wrap("scheduler", Engine._plan)
        self.next_plan: Any = None

    def work(self, name: str) -> str:
        self.calls.append(name)
        self.clock.advance(self.SECONDS[name])
        if name == self.raising:
            raise RuntimeError(f"SGLang's own error in {name}")
        return name

    def _draft_forward(self, worker: Any) -> None:
        for _ in range(self.speculative_num_steps - 1):
            self.model_forward()
        self.work("organise")

    def _target_forward(self, *, is_verify: bool = False) -> None:
        self.model_forward_of_target("target_verify" if is_verify else "target_prefill")

    def model_forward_of_target(self, name: str) -> None:
        # The target's model runner is the same class as the draft's: its forward passes the draft step hook too.
        self.work(name)
        self.SECONDS["forward"], kept = 0.0, self.SECONDS["forward"]
        try:
            self.model_forward()
        finally:
            self.SECONDS["forward"] = kept

    def _verify(self, batch: Batch) -> None:
        self.prepare()
        self.work("between")
        self.target_forward(is_verify=True)
        self.sample()
        if self.topk > 1:
            self.kv_compact()

    def _generate(self, batch: Batch, on_publish: Any = None) -> Any:
        assert on_publish != "lost"
        beside = batch.is_extend_in_batch and self.coordinated
        if batch.forward_mode.is_extend() or (batch.is_extend_in_batch and not beside):
            if beside and batch.forward_mode.is_extend():
                self._draft(self)
            self.target_forward()
            self.draft_extend()
            return SimpleNamespace()
        if batch.forward_mode.is_idle():
            return SimpleNamespace()
        if self.speculative_num_steps and not self.drafted:
            self._draft(self)
        batch.spec_info = SimpleNamespace(
            spec_steps=self.speculative_num_steps, draft_token_num=self.speculative_num_steps + 1
        )
        self.verify(self, batch)
        self.draft_extend()
        if self.drafts_ahead:
            self.clock.advance(0.0007)  # the copy of the new lengths to the host
            self._draft(self)
            self.drafted = True
        rows = len(batch.reqs)
        # The second is there when the result is processed; this outline has it at once.
        return SimpleNamespace(accept_lens=object(), num_correct_drafts_per_req_cpu=[2] * rows)

    def _draft(self, _: Any) -> None:
        self.kv_prepare()
        self.work("before_draft")
        self.draft_forward(self)
        self.tree_build()

    def _process(self, batch: Batch, result: Any) -> str:
        self.calls.append("process")
        if self.raising == "process":
            raise RuntimeError("SGLang's own error in process")
        for request in batch.reqs:
            if request.finished_reason is None:
                request.output_ids += [1, 1, 1]
                if request.rid in self.ending:
                    request.finished_reason = "length"
        return "processed"

    def _plan(self, running: Any) -> Any:
        return self.next_plan

    def cycle(self, batch: Batch) -> Any:
        result = self.generate(self, batch)
        assert self.process(self, batch, result) == "processed"
        return result


class Rig:
    """A session that measures an outline engine with a hand-moved clock."""

    def __init__(self, directory: Path, *, started: bool = True, **engine: int) -> None:
        self.clock = HandClock(24, 64)
        self.session = Session()
        self.engine = Engine(self.session, self.clock, **engine)
        self.directory = directory
        self.recorder = make_recorder(directory, make_plan(tiers=(0, 3)))
        self.budget = Budget(1, now=lambda: self.clock.now)
        if started:
            self.start()

    def start(self) -> None:
        timer = CycleTimer(self.clock, self.recorder, self.budget)
        self.session.start(timer, self.recorder, self.budget, Control(self.directory), recording=True)

    def tell(self, *commands: str) -> None:
        """Give commands, which the next cycle sees as if it came `POLL_NS` later."""
        control.write(self.directory, list(commands))
        self.session._poll_at_ns = 0

    def value(self, name: str, *labels: str) -> float:
        """Return a value after the results that wait have been recorded."""
        self.flush()
        return value(self.recorder, name, *labels)

    def histogram(self, name: str, *labels: str) -> Observed:
        """Return number and sum of a histogram, likewise."""
        self.flush()
        return histogram(self.recorder, name, *labels)

    def flush(self) -> None:
        if self.session.timer is not None:
            self.session.flush()

    def phases(self) -> dict[str, float]:
        return {phase: self.histogram("eagle_phase_duration_seconds", phase)[1] for phase in catalogue.PHASES}

    def errors(self) -> dict[str, int]:
        counts = {hook: self.value("eagle_hook_errors_total", hook) for hook in catalogue.HOOKS}
        return {hook: int(count) for hook, count in counts.items() if count}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def batch(*requests: Request, mode: str = "decode", **facts: Any) -> Batch:
    return Batch(list(requests) or [Request()], Mode(mode), **facts)


# --- what a cycle becomes --------------------------------------------------------------------------------
def test_each_function_of_a_chain_cycle_lands_in_its_phase(rig: Rig) -> None:
    for _ in range(5):
        rig.engine.cycle(batch())
    phases = rig.phases()
    assert phases == pytest.approx(
        {
            "draft_steps": 5 * (2 * 0.002 + 0.0003),
            "target_verify": 5 * 0.020,
            "draft_extend": 5 * 0.003,
            "verify_overhead": 5 * (0.0005 + 0.0006 + 0.0002 + 0.0007),
            "kv_cache": 5 * 0.001,
            "other": 5 * 0.0001,
        }
    )
    count, seconds = rig.histogram("eagle_cycle_duration_seconds")
    assert (count, seconds) == (5, pytest.approx(sum(phases.values()), rel=1e-12))


def test_a_tree_also_moves_its_accepted_tokens(tmp_path: Path) -> None:
    rig = Rig(tmp_path, topk=4)
    rig.engine.cycle(batch())
    assert rig.phases()["kv_cache"] == pytest.approx(0.001 + 0.0008)
    assert rig.phases()["verify_overhead"] == pytest.approx(0.0005 + 0.0006 + 0.0002 + 0.0007)


def test_each_draft_forward_has_its_own_step(rig: Rig) -> None:
    rig.engine.cycle(batch())
    for step in ("1", "2"):
        assert rig.value("eagle_draft_step_seconds_total", step) == pytest.approx(0.002)
        assert rig.value("eagle_draft_steps_total", step) == 1


def test_the_parts_of_the_first_cycle_are_those_of_the_functions(rig: Rig) -> None:
    rig.engine.cycle(batch())
    assert rig.value("eagle_verify_overhead_sampled_cycles_total") == 1
    for part, seconds in (("tree_build", 0.0005), ("prepare", 0.0006), ("sample_accept", 0.0007)):
        assert rig.value("eagle_verify_overhead_part_seconds_total", part) == pytest.approx(seconds)


def test_a_prefill_is_no_cycle(rig: Rig) -> None:
    rig.engine.cycle(batch(mode="extend"))
    name = "eagle_prefill_phase_duration_seconds"
    assert rig.histogram(name, "target_prefill") == (1, pytest.approx(0.050))
    assert rig.histogram(name, "draft_extend") == (1, pytest.approx(0.003))
    assert rig.value("eagle_cycles_total") == 0
    assert rig.value("eagle_output_tokens_total") == 3


def test_a_decode_rank_that_takes_the_prefill_path_of_another_is_left_out_and_counted(rig: Rig) -> None:
    """Under DP attention: it decodes without a draft, and at the pace of somebody else's prompt."""
    rig.engine.cycle(batch())
    rig.engine.cycle(batch(is_extend_in_batch=True))
    rig.clock.advance(0.5)
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 2
    assert rig.value("eagle_cycles_excluded_total", "prefill_path") == 1
    assert rig.histogram("eagle_prefill_phase_duration_seconds", "target_prefill")[0] == 0
    assert rig.value("eagle_drafts_total") == 2
    assert rig.value("eagle_output_tokens_total") == 9
    assert rig.histogram("eagle_cycle_gap_seconds")[0] == 0, "the next cycle does not follow a cycle"
    assert rig.errors() == {}


def test_a_decode_rank_that_decodes_beside_another_ones_prefill_is_a_cycle(rig: Rig) -> None:
    """0.5.21 and newer can let each rank do its own work (``enable_dp_spec_prefill_coordination``)."""
    rig.engine.coordinated = True
    rig.engine.cycle(batch(is_extend_in_batch=True))
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 2
    assert rig.value("eagle_accepted_tokens_total") == 4
    assert rig.value("eagle_cycles_excluded_total", "prefill_path") == 0
    assert rig.histogram("eagle_cycle_gap_seconds")[0] == 1
    assert rig.phases()["target_verify"] == pytest.approx(2 * 0.020)


def test_a_prefilling_rank_that_drafts_idly_for_the_others_still_times_its_target(rig: Rig) -> None:
    rig.engine.coordinated = True
    rig.engine.cycle(batch(mode="extend", is_extend_in_batch=True))
    name = "eagle_prefill_phase_duration_seconds"
    assert rig.histogram(name, "target_prefill") == (1, pytest.approx(0.050))
    assert rig.histogram(name, "draft_extend") == (1, pytest.approx(0.003))
    assert rig.value("eagle_cycles_total") == 0
    assert rig.errors() == {}


def test_an_idle_rank_beside_a_prefill_is_idle(rig: Rig) -> None:
    rig.engine.generate(rig.engine, Batch([], Mode("idle"), is_extend_in_batch=True))
    assert rig.value("eagle_cycles_excluded_total", "idle") == 1
    assert rig.histogram("eagle_prefill_phase_duration_seconds", "target_prefill")[0] == 0
    assert rig.clock.free == rig.clock.slots


def test_an_idle_rank_is_counted_and_nothing_else(rig: Rig) -> None:
    rig.engine.generate(rig.engine, Batch([], Mode("idle")))
    assert rig.value("eagle_cycles_excluded_total", "idle") == 1
    assert rig.value("eagle_cycles_total") == 0
    assert rig.clock.free == rig.clock.slots


def test_without_drafting_what_precedes_the_verify_prepares_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, num_steps=0)
    rig.engine.cycle(batch())
    assert rig.value("eagle_batch_cycles_total", "1", "0") == 1
    assert rig.value("eagle_batch_phase_seconds_total", "1", "0", "draft_steps") == 0
    assert rig.value("eagle_batch_phase_seconds_total", "1", "0", "target_verify") == pytest.approx(0.020)


def test_the_last_stage_of_a_pipeline_drafts_the_next_cycle_in_this_one(rig: Rig) -> None:
    """0.5.21 and newer: its draft belongs to the cycle that it runs in, and the result is made anew on its way."""
    rig.session.tail_draft = True
    rig.engine.drafts_ahead = True
    flying: list[tuple[Batch, Any]] = []
    first = Request(), Request()
    for requests in (first, (Request(),), first):
        current = batch(*requests)
        result = rig.engine.generate(rig.engine, current)
        # SGLang sends the last stage's result around all stages, and makes another object of it; it is processed with
        # a copy of the batch, whose own rows may be others by then.
        anew = SimpleNamespace(**{name: value for name, value in vars(result).items() if not name.startswith("_eagle")})
        flying.append((batch(*requests), anew))
        current.reqs = []
        if len(flying) == 2:
            assert rig.engine.process(rig.engine, *flying.pop(0)) == "processed"
    assert rig.engine.process(rig.engine, *flying.pop(0)) == "processed"
    assert rig.value("eagle_cycles_total") == 3
    assert rig.value("eagle_batch_drafts_total", "2", "3") == 4
    assert rig.value("eagle_batch_drafts_total", "1", "3") == 1
    assert rig.value("eagle_cycles_dropped_total", "unmatched") == 0
    phases = rig.phases()
    assert phases["draft_extend"] == pytest.approx(3 * 0.003), "the copy to the host that follows is not in it"
    # The first cycle of the outline drafts at both of its ends.
    assert phases["draft_steps"] == pytest.approx(4 * (2 * 0.002 + 0.0003))
    assert phases["kv_cache"] == pytest.approx(4 * 0.001)
    assert phases["verify_overhead"] == pytest.approx(3 * (0.0006 + 0.0002 + 0.0007) + 4 * 0.0005)
    assert phases["other"] == pytest.approx(3 * 0.0007 + 4 * 0.0001)
    assert sum(phases.values()) == pytest.approx(rig.histogram("eagle_cycle_duration_seconds")[1])
    assert rig.errors() == {}


def test_a_result_of_a_pipeline_that_belongs_to_no_cycle_takes_none(rig: Rig) -> None:
    rig.session.tail_draft = True
    current = batch()
    result = rig.engine.generate(rig.engine, current)
    stranger = SimpleNamespace(num_correct_drafts_per_req_cpu=[1])
    rig.engine.process(rig.engine, batch(Request(rid="launched while switched off")), stranger)
    assert rig.value("eagle_drafts_total") == 0
    rig.engine.process(rig.engine, current, result)
    assert rig.value("eagle_accepted_tokens_total") == 2
    assert not rig.session._launched
    assert rig.errors() == {}


def test_acceptance_and_output_are_counted_per_request(rig: Rig) -> None:
    rig.engine.cycle(batch(Request(), Request(), Request(finished_reason="length")))
    assert rig.value("eagle_drafts_total") == 2
    assert rig.value("eagle_accepted_tokens_total") == 4
    assert rig.value("eagle_draft_tokens_total") == 6
    assert rig.value("eagle_wasted_rows_total") == 1
    assert rig.value("eagle_output_tokens_total") == 6
    assert rig.value("eagle_batch_cycles_total", "3-4", "3") == 1


def test_the_overlap_loop_counts_each_result_with_its_own_cycle(rig: Rig) -> None:
    engine, previous = rig.engine, None
    batches = [batch(*(Request() for _ in range(rows))) for rows in (1, 2, 4)]
    for current in batches:
        result = engine.generate(engine, current)
        if previous is not None:
            engine.process(engine, *previous)
        previous = (current, result)
    assert previous is not None
    engine.process(engine, *previous)
    assert [rig.value("eagle_batch_drafts_total", size, "3") for size in ("1", "2", "3-4")] == [1, 2, 4]
    assert rig.value("eagle_cycles_total") == 3
    assert rig.errors() == {}


def test_nothing_of_ours_stays_on_the_result(rig: Rig) -> None:
    result = rig.engine.cycle(batch())
    assert not hasattr(result, RECORD)


def test_arguments_by_keyword_and_by_position_both_work(rig: Rig) -> None:
    engine, decode = rig.engine, batch()
    result = engine.generate(engine, batch=decode, on_publish=None)
    engine.process(engine, batch=decode, result=result)
    assert rig.value("eagle_cycles_total") == 1


def test_a_cycle_inside_a_cycle_is_one(rig: Rig) -> None:
    """A subclass's method that calls its parent's passes the hook twice."""
    engine = rig.engine
    inner = engine.generate

    def outer_method(worker: Any, current: Batch) -> Any:
        return inner(worker, current)

    outer = rig.session.wrapper("cycle")(outer_method)
    decode = batch()
    engine.process(engine, decode, outer(engine, decode))
    engine.process(engine, decode, outer(engine, decode))
    assert rig.value("eagle_cycles_total") == 2
    assert rig.value("eagle_cycles_dropped_total", "unmatched") == 0
    assert rig.errors() == {}


def test_without_speculation_the_targets_forward_is_the_cycle(tmp_path: Path) -> None:
    """``ENABLED=1`` on a server without a draft model: its decode is the baseline, under ``num_steps="0"``."""
    rig = Rig(tmp_path)
    rig.session.plain_decode = True
    model_forward = rig.session.wrapper("plain_forward")(lambda: rig.clock.advance(Engine.SECONDS["forward"]))

    def forward(_worker: Any, _batch: Batch) -> Any:
        rig.clock.advance(0.001)
        model_forward()
        rig.clock.advance(0.0005)
        return SimpleNamespace()

    target = rig.session.wrapper("plain_cycle")(forward)
    for mode in ("extend", "decode", "decode"):
        current = batch(Request(), Request(), mode=mode)
        assert rig.engine.process(rig.engine, current, target(SimpleNamespace(), current)) == "processed"
    assert rig.value("eagle_cycles_total") == 2
    assert rig.value("eagle_batch_timed_cycles_total", "2", "0") == 2
    assert rig.value("eagle_batch_drafts_total", "2", "0") == 4
    seconds = {phase: rig.value("eagle_batch_phase_seconds_total", "2", "0", phase) for phase in catalogue.PHASES}
    assert seconds["target_verify"] == pytest.approx(2 * Engine.SECONDS["forward"])
    assert sum(seconds.values()) == pytest.approx(2 * (0.001 + Engine.SECONDS["forward"] + 0.0005))
    assert rig.histogram("eagle_cycle_duration_seconds")[0] == 0
    assert rig.value("eagle_drafts_total") == 0
    assert rig.value("eagle_output_tokens_total") == 3 * 6
    assert rig.errors() == {}


# --- the scheduler's loop --------------------------------------------------------------------------------
def plan(running: list[Request], to_run: Any = None) -> Any:
    return SimpleNamespace(batch_to_run=to_run, running_batch=SimpleNamespace(reqs=running))


def test_running_requests_are_shown_also_when_idle(rig: Rig) -> None:
    engine = rig.engine
    for running in ([Request(), Request()], [Request()], []):
        engine.next_plan = plan(running)
        assert engine.plan(engine, None) is engine.next_plan
        assert rig.value("eagle_running_requests") == len(running)


def test_running_requests_of_a_busy_server_are_those_of_some_batches_ago_at_most(rig: Rig) -> None:
    engine, busy = rig.engine, batch()
    for running in (1, 2, 3):
        for _ in range(LOOK_EVERY):
            engine.next_plan = plan([Request()] * running, busy)
            engine.plan(engine, None)
            engine.cycle(busy)
        assert rig.value("eagle_running_requests") == running
    engine.next_plan = plan([])
    engine.plan(engine, None)
    engine.next_plan = plan([Request()] * 7, busy)
    engine.plan(engine, None)
    assert rig.value("eagle_running_requests") == 7, "the first batch after a rest is looked at"


def test_an_older_scheduler_returns_the_batch_itself(rig: Rig) -> None:
    engine = rig.engine
    engine.running_batch = SimpleNamespace(reqs=[Request()] * 3)  # type: ignore[attr-defined]
    engine.next_plan = None
    assert engine.plan(engine, None) is None
    assert rig.value("eagle_running_requests") == 3


def test_an_empty_iteration_ends_a_run_of_cycles_and_a_decode_does_not(rig: Rig) -> None:
    engine = rig.engine
    for to_run in ("batch", None):
        engine.cycle(batch())
        engine.next_plan = plan([Request()], to_run)
        engine.plan(engine, None)
        rig.clock.advance(0.5)
    engine.cycle(batch())
    assert rig.histogram("eagle_cycle_gap_seconds") == (1, pytest.approx(0.5))


# --- before the start ------------------------------------------------------------------------------------
def test_before_its_start_a_session_passes_everything_through(tmp_path: Path) -> None:
    """SGLang warms up and captures graphs while its scheduler is being made."""
    rig = Rig(tmp_path, started=False)
    rig.engine.cycle(batch())
    rig.engine.cycle(batch(mode="extend"))
    rig.engine.next_plan = plan([])
    rig.engine.plan(rig.engine, None)
    assert rig.clock.free == rig.clock.slots
    rig.start()
    assert rig.value("eagle_cycles_total") == 0
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 1
    assert rig.errors() == {}


# --- fail open -------------------------------------------------------------------------------------------
OURS = {
    "begin_cycle": "cycle",
    "end_cycle": "cycle",
    "note_verify": "verify",
    "enter_kv_prepare": "kv_prepare",
    "leave_kv_prepare": "kv_prepare",
    "enter_draft": "draft",
    "leave_draft": "draft",
    "end_draft_step": "draft_step",
    "note_kv_allocation": "kv_allocation",
    "before_result": "accept",
    "after_result": "accept",
    "flush": "",
    "note_plan": "scheduler",
}


def run_everything(engine: Engine) -> list[Any]:
    """Everything a server does, once; what SGLang sees of it."""
    seen: list[Any] = []
    for current in (batch(mode="extend"), batch(Request(), Request()), batch()):
        engine.next_plan = plan(current.reqs, current)
        seen.append(engine.plan(engine, None) is engine.next_plan)
        seen.append(engine.allocate())
        result = engine.generate(engine, current)
        seen.append(sorted(name for name in vars(result) if not name.startswith("_eagle")))
        seen.append(engine.process(engine, current, result))
        seen.append([list(request.output_ids) for request in current.reqs])
    engine.next_plan = plan([])
    seen.append(engine.plan(engine, None) is engine.next_plan)
    return seen


class Fault:
    """An error in a method of ours that can be mended while everything runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.active = True
        original = getattr(Session, method)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                raise RuntimeError("our own error")
            return original(*args, **kwargs)

        monkeypatch.setattr(Session, method, broken)


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[str]]:
    """What SGLang sees and calls when nothing is measured."""
    rig = Rig(tmp_path_factory.mktemp("undisturbed"), started=False, topk=4)
    return run_everything(rig.engine), rig.engine.calls


@pytest.mark.parametrize("method", OURS)
def test_an_error_of_ours_changes_nothing_in_sglang(
    tmp_path: Path,
    undisturbed: tuple[list[Any], list[str]],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault = Fault(monkeypatch, method)
    rig = Rig(tmp_path, topk=4)
    seen = run_everything(rig.engine)
    assert (seen, rig.engine.calls) == undisturbed
    fault.active = False
    errors = rig.errors()
    assert errors, f"{method} is not called at all"
    if OURS[method]:
        assert set(errors) == {OURS[method]}
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == len(errors), "logged once per hook"
    # And the next cycle without an error is measured as if nothing had been.
    before = rig.value("eagle_cycles_total"), rig.histogram("eagle_cycle_duration_seconds")[0]
    rig.engine.cycle(batch())
    rig.engine.cycle(batch())
    after = rig.value("eagle_cycles_total"), rig.histogram("eagle_cycle_duration_seconds")[0]
    assert after == (before[0] + 2, before[1] + 2)
    assert rig.clock.free >= rig.clock.slots - 1


@pytest.mark.parametrize("kind", ["mark", "relabel", "acquire", "release", "offsets"])
@pytest.mark.parametrize("number", range(16))
def test_an_error_at_any_boundary_changes_nothing_in_sglang_and_costs_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[list[Any], list[str]], kind: str, number: int
) -> None:
    """The clock or the timer fails once, at the first, second, ... call in everything that a server does."""
    rig = Rig(tmp_path, topk=4)
    timer = rig.session.timer
    assert timer is not None
    owner: Any = timer if kind == "relabel" else rig.clock
    original = getattr(owner, kind)
    calls = 0

    def fails_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise RuntimeError("our own error")
        return original(*args)

    monkeypatch.setattr(owner, kind, fails_once)
    assert (run_everything(rig.engine), rig.engine.calls) == undisturbed
    failed = calls > number
    calls = 10**6
    assert sum(rig.errors().values()) == failed
    assert rig.value("eagle_output_tokens_total") == 12
    # Nothing of it is left: later cycles are measured, and the pool is whole again.
    before = rig.histogram("eagle_cycle_duration_seconds")[0]
    for _ in range(3):
        rig.engine.cycle(batch())
    rig.engine.cycle(batch(mode="extend"))
    assert rig.histogram("eagle_cycle_duration_seconds")[0] == before + 3
    assert rig.value("eagle_cycles_total") == 2 + 3
    assert rig.value("eagle_drafts_total") == 3 + 3
    # A prefill that could not even begin has no times, and that is said.
    assert rig.value("eagle_cycles_dropped_total", "unmatched") <= (failed and kind in ("mark", "acquire"))
    assert rig.clock.free >= rig.clock.slots - (failed and kind == "release")


@pytest.mark.parametrize("method", [name for name in OURS if name.startswith(("enter_", "leave_", "end_draft"))])
def test_an_error_in_a_span_costs_times_and_no_count(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault(monkeypatch, method)
    rig = Rig(tmp_path, topk=4)
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 1
    assert rig.value("eagle_accepted_tokens_total") == 2
    assert rig.value("eagle_output_tokens_total") == 3
    assert rig.histogram("eagle_cycle_duration_seconds")[0] == 0
    assert rig.value("eagle_cycles_dropped_total", "hook_error") == 1


@pytest.mark.parametrize("name", [name for name in Engine.SECONDS if name not in ("target_prefill", "allocation")])
def test_an_error_of_sglang_passes_through_and_leaves_the_hooks_whole(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path, topk=4)
    rig.engine.cycle(batch())
    rig.engine.raising = name
    with pytest.raises(RuntimeError, match=f"SGLang's own error in {name}"):
        rig.engine.cycle(batch())
    rig.engine.raising = ""
    rig.engine.cycle(batch())
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_dropped_total", "unmatched") == 0, "no result was to be expected"
    assert rig.value("eagle_cycles_total") == 3
    assert rig.errors() == {}
    assert rig.clock.free >= rig.clock.slots - 1


def test_an_error_of_sglang_in_a_prefill_or_in_processing_passes_through(rig: Rig) -> None:
    for name, mode in (("target_prefill", "extend"), ("process", "decode")):
        rig.engine.raising = name
        with pytest.raises(RuntimeError, match=name):
            rig.engine.cycle(batch(mode=mode))
        rig.engine.raising = ""
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 1
    assert rig.errors() == {}


def test_repeated_errors_stop_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(monkeypatch, "enter_draft")
    rig = Rig(tmp_path)
    for _ in range(2 * FUSE_ERRORS):
        rig.engine.cycle(batch())
    assert rig.errors() == {"draft": FUSE_ERRORS}
    assert rig.value("eagle_timing_enabled", "fuse_errors") == 1
    assert rig.value("eagle_timing_enabled", "on") == 0


def test_an_error_before_the_start_is_counted_once_there_is_a_file(tmp_path: Path) -> None:
    rig = Rig(tmp_path, started=False)
    rig.session.failed("sample")
    rig.session.failed("sample")
    rig.start()
    assert rig.errors() == {"sample": 2}


def test_noting_an_error_never_raises(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the recorder fails too")

    monkeypatch.setattr(rig.recorder, "error", broken)
    rig.session.failed("cycle")


# --- results that wait -----------------------------------------------------------------------------------
def published(rig: Rig) -> float:
    """Return the cycles that a reader sees, without asking the session to hurry."""
    return value(rig.recorder, "eagle_cycles_total")


@pytest.fixture
def patient(rig: Rig) -> Rig:
    """A session whose time to publish is far away."""
    rig.session._flush_at_ns = 2**63
    return rig


def test_results_are_recorded_together_after_some_of_them(patient: Rig) -> None:
    for count in range(FLUSH_RESULTS):
        assert published(patient) == 0
        assert count < FLUSH_RESULTS
        patient.engine.cycle(batch())
    assert published(patient) == FLUSH_RESULTS


def test_results_are_recorded_when_their_time_has_come(patient: Rig) -> None:
    patient.engine.cycle(batch())
    assert published(patient) == 0
    patient.session._flush_at_ns = 0
    patient.engine.cycle(batch())
    assert published(patient) == 2


def test_the_last_answer_of_a_batch_lets_no_result_wait(patient: Rig) -> None:
    """An offline script's Engine kills its scheduler as soon as it has its answers."""
    requests = [Request(rid="first"), Request(rid="second")]
    patient.engine.ending = {"first"}
    patient.engine.cycle(batch(*requests))
    assert published(patient) == 0
    patient.engine.ending = {"second"}
    patient.engine.cycle(batch(*requests))
    assert published(patient) == 2


def test_an_idle_server_lets_no_result_wait(patient: Rig) -> None:
    patient.engine.next_plan = plan([])
    patient.engine.plan(patient.engine, None)
    patient.session._flush_at_ns = 2**63
    patient.session._idle_poll = math.inf  # nor has its time come to look around
    patient.engine.cycle(batch())
    assert published(patient) == 0
    patient.engine.plan(patient.engine, None)
    assert published(patient) == 1


def test_a_result_that_never_comes_keeps_no_idle_server_busy(patient: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle scheduler may look around ten thousand times a second, and what that costs would blow the fuse."""
    patient.engine.next_plan = plan([])
    patient.engine.generate(patient.engine, batch())
    patient.engine.plan(patient.engine, None)
    patient.session._idle_poll = math.inf
    flushes = 0

    def counted() -> None:
        nonlocal flushes
        flushes += 1

    monkeypatch.setattr(patient.session, "flush", counted)
    for _ in range(100):
        patient.engine.plan(patient.engine, None)
    assert flushes == 0


def test_switching_off_records_what_waits(patient: Rig) -> None:
    for _ in range(3):
        patient.engine.cycle(batch())
    patient.budget.set_state("off")
    assert published(patient) == 3


@pytest.mark.parametrize("in_flight", [2, 8])
@pytest.mark.parametrize("clock", [HostClock, SyncClock, CudaEventClock, DriverEventClock])
def test_waiting_results_never_exhaust_the_clocks_pool(tmp_path: Path, clock: type, in_flight: int) -> None:
    """The pool that a real clock has by default; cycles in flight, one kept for its end, the rest waits."""
    rig = Rig(tmp_path)
    slots = inspect.signature(clock).parameters["slots"].default
    rig.clock = rig.engine.clock = HandClock(slots, 64)
    rig.start()
    rig.session._flush_at_ns = 2**63
    engine, flying = rig.engine, []
    for _ in range(5 * FLUSH_RESULTS):
        current = batch()
        flying.append((current, engine.generate(engine, current)))
        if len(flying) > in_flight:
            engine.process(engine, *flying.pop(0))
    assert rig.value("eagle_cycles_total") == 5 * FLUSH_RESULTS - in_flight
    assert sum(rig.value("eagle_cycles_dropped_total", reason) for reason in catalogue.DROPPED_REASONS) == 0


def test_results_of_many_rows_are_recorded_sooner(patient: Rig) -> None:
    """The server waits while they are recorded."""
    requests = [Request(rid=str(row)) for row in range(FLUSH_ROWS // 4)]
    for count in range(9):
        assert published(patient) == count // 4 * 4
        patient.engine.cycle(batch(*requests))


def test_after_results_were_recorded_the_next_ones_wait_again(patient: Rig) -> None:
    patient.session._flush_at_ns = 0
    patient.engine.cycle(batch())
    assert published(patient) == 1
    assert 0 < patient.session._flush_at_ns - perf_counter_ns() <= FLUSH_NS < 1_000_000_000
    patient.session._flush_at_ns += 10**12
    patient.engine.cycle(batch())
    assert published(patient) == 1


def test_a_result_that_waits_holds_none_of_its_requests(patient: Rig) -> None:
    request = Request()
    alive = weakref.ref(request)
    patient.engine.cycle(batch(request))
    del request
    gc.collect()
    assert published(patient) == 0
    assert alive() is None


def test_the_host_time_of_allocations_is_the_sum_of_them_once(rig: Rig) -> None:
    rig.session.note_kv_allocation(3_000)
    rig.session.note_kv_allocation(4_000)
    assert rig.value("eagle_kv_allocation_host_seconds_total") == pytest.approx(7e-6)
    assert rig.value("eagle_kv_allocation_host_seconds_total") == pytest.approx(7e-6)


class Spending(Budget):
    """Keeps what it is told."""

    def spent(self, timing: float, counting: float, cycles: int, *, prefills: float = 0.0) -> None:
        self.told = (timing, counting, cycles, prefills)


def test_the_budget_is_told_what_timing_counting_and_prefills_have_cost(patient: Rig) -> None:
    budget = patient.budget = Spending(1)
    patient.start()
    patient.flush()
    told: list[tuple[float, float, int, float]] = []
    total = patient.value("eagle_hook_host_seconds_total")
    for mode in ("decode", "decode", "extend", "none"):
        patient.session._flush_at_ns = 2**63
        budget.countdown = 1 if len(told) == 0 else 1 << 62
        for _ in range(0 if mode == "none" else 3):
            patient.engine.cycle(batch(mode=mode))
        patient.session.flush()
        told.append(budget.told)
        now = value(patient.recorder, "eagle_hook_host_seconds_total")
        timing, counting, _, prefills = budget.told
        assert timing + counting + prefills == pytest.approx(now - total)
        total = now
    (timed, counted, prefilled, nothing) = told
    assert [each[2] for each in told] == [3, 3, 3, 0]
    assert min(timed[:2]) > 0, "cycles that are timed"
    assert counted[0] == 0 < counted[1], "cycles that are not"
    assert prefilled[0] == 0 < min(prefilled[1], prefilled[3]), "prefills"
    assert timed[3] == counted[3] == 0
    assert nothing[0] == nothing[3] == 0, "each cost is told once"


def test_all_that_was_spent_is_in_the_host_time(patient: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count().__next__
    for module in (cycle, session):
        monkeypatch.setattr(module, "perf_counter_ns", now)
    patient.flush()
    before = value(patient.recorder, "eagle_hook_host_seconds_total")
    patient.session._flush_at_ns = 2**63
    for mode in ("decode", "extend", "extend", "extend"):
        patient.engine.cycle(batch(mode=mode))
    timer = patient.session.timer
    assert timer is not None
    waiting = timer.host_ns + timer.timed_ns + timer.prefill_ns + patient.session._spent_ns
    patient.session.flush()
    # It looks at the time as it begins and ends, and around the reading of each times.
    assert value(patient.recorder, "eagle_hook_host_seconds_total") - before == pytest.approx(
        (waiting + 1 + 4 * 2) * 1e-9
    )


def test_the_gap_before_a_timed_cycle_is_known_where_the_one_before_it_is_not_timed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.budget = Budget(3, now=lambda: rig.clock.now)
    rig.start()
    for _ in range(10):
        rig.engine.cycle(batch())
        rig.clock.advance(0.007)
    assert rig.histogram("eagle_cycle_duration_seconds")[0] == 4
    assert rig.histogram("eagle_cycle_gap_seconds") == (3, pytest.approx(3 * 0.007))


def test_a_cycle_whose_times_cannot_be_read_costs_the_others_nothing(
    patient: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets, calls = patient.clock.offsets, 0

    def fails_once(slot: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("our own error")
        return offsets(slot)

    monkeypatch.setattr(patient.clock, "offsets", fails_once)
    for _ in range(5):
        patient.engine.cycle(batch())
    assert patient.value("eagle_cycles_total") == 5
    assert patient.value("eagle_accepted_tokens_total") == 10
    assert patient.histogram("eagle_cycle_duration_seconds")[0] == 4
    assert patient.errors() == {"accept": 1}
    assert patient.clock.free >= patient.clock.slots - 1


def test_a_result_that_cannot_be_costs_the_others_nothing(patient: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    process, calls = patient.engine.process, 0

    def one_too_many(engine: Any, one: Batch, result: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            result.num_correct_drafts_per_req_cpu.append(1)
        return process(engine, one, result)

    monkeypatch.setattr(patient.engine, "process", one_too_many)
    for _ in range(5):
        patient.engine.cycle(batch())
    assert patient.value("eagle_cycles_total") == 4
    assert patient.errors() == {"accept": 1}


def test_a_last_answer_that_says_nothing_lets_no_earlier_result_wait(
    patient: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(rid="first")]
    patient.engine.cycle(batch(*requests))
    assert published(patient) == 0
    process = patient.engine.process

    def says_nothing(engine: Any, one: Batch, result: Any) -> Any:
        result.accept_lens = result.num_correct_drafts_per_req_cpu = None
        return process(engine, one, result)

    monkeypatch.setattr(patient.engine, "process", says_nothing)
    patient.engine.ending = {"first"}
    patient.engine.cycle(batch(*requests))
    assert published(patient) == 1
    assert value(patient.recorder, "eagle_output_tokens_total") == 6
    assert value(patient.recorder, "eagle_hook_errors_total", "accept") == 1


@pytest.mark.parametrize("missing", ["spec_steps", "draft_token_num"])
def test_a_verify_input_that_says_only_half_leaves_the_steps_to_the_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    verify = rig.engine.verify

    def half(engine: Any, current: Batch) -> Any:
        delattr(current.spec_info, missing)
        return verify(engine, current)

    monkeypatch.setattr(rig.engine, "verify", half)
    rig.engine.cycle(batch())
    assert rig.value("eagle_batch_cycles_total", "1", "3") == 1
    assert rig.value("eagle_draft_tokens_total") == 3
    assert rig.value("eagle_spec_num_draft_tokens") == 4
    assert rig.errors() == {"verify": 1}


def test_draft_steps_that_cannot_be_read_hold_no_result_up(patient: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise RuntimeError("our own error")

    monkeypatch.setattr(patient.session, "collect_draft_steps", fails)
    patient.engine.cycle(batch())
    patient.session.flush()
    assert published(patient) == 1
    assert value(patient.recorder, "eagle_hook_errors_total", "draft_graph") == 1


def test_a_cycle_whose_end_cannot_be_marked_still_counts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("our own error")

    assert rig.session.timer is not None
    monkeypatch.setattr(rig.session.timer, "close", fails)
    rig.engine.cycle(batch())
    monkeypatch.undo()
    rig.engine.cycle(batch())
    assert rig.value("eagle_batch_cycles_total", "1", "3") == 2
    assert rig.value("eagle_accepted_tokens_total") == 4
    assert rig.value("eagle_cycles_dropped_total", "unmatched") == 0
    assert rig.histogram("eagle_cycle_duration_seconds")[0] == 1
    assert rig.errors() == {"cycle": 1}


def test_a_driver_that_fails_for_good_stops_everything_and_is_asked_no_more(
    patient: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> bool:
        raise RuntimeError("CUDA error 999")

    patient.engine.next_plan = plan([])
    patient.engine.plan(patient.engine, None)
    patient.session._idle_poll = math.inf
    monkeypatch.setattr(patient.clock, "done", fails)
    for number in range(3 * FUSE_ERRORS):
        patient.engine.cycle(batch())
        if number % 2:
            patient.engine.plan(patient.engine, None)
    assert patient.budget.state == "fuse_errors"
    assert sum(patient.errors().values()) == FUSE_ERRORS
    for _ in range(100):
        patient.engine.plan(patient.engine, None)
    assert sum(patient.errors().values()) == FUSE_ERRORS
    assert patient.value("eagle_cycles_total") == FUSE_ERRORS, "their times are lost, and no count"


# --- off and on ------------------------------------------------------------------------------------------
def test_off_takes_effect_with_the_next_cycle_and_on_undoes_it(rig: Rig) -> None:
    rig.engine.cycle(batch())
    rig.tell("off")
    calls = len(rig.engine.calls)
    rig.engine.cycle(batch())
    assert len(rig.engine.calls) > calls
    assert rig.value("eagle_cycles_total") == 1
    assert rig.value("eagle_timing_enabled", "off") == 1
    assert rig.value("eagle_timing_enabled", "on") == 0
    rig.tell("on")
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 2
    assert rig.value("eagle_timing_enabled", "on") == 1
    # What ran meanwhile is no gap.
    assert rig.histogram("eagle_cycle_gap_seconds")[0] == 0
    assert rig.value("eagle_output_tokens_total") == 6


def test_results_that_wait_when_it_is_switched_off_leave_no_gauge_behind(patient: Rig) -> None:
    patient.engine.cycle(batch())
    patient.flush()
    assert value(patient.recorder, "eagle_spec_num_steps") == 3
    patient.session._flush_at_ns = 2**63
    patient.engine.cycle(batch())
    patient.budget.set_state("off")
    assert published(patient) == 2
    for name in ("eagle_spec_num_steps", "eagle_spec_num_draft_tokens", "eagle_running_requests"):
        assert math.isnan(value(patient.recorder, name))
    patient.budget.set_state("on")
    patient.engine.cycle(batch())
    assert patient.value("eagle_spec_num_steps") == 3


def test_a_result_of_a_pipeline_after_a_pause_is_of_no_cycle_before_it(rig: Rig) -> None:
    """The requests are the same, and the result of the last cycle before the pause passed unseen."""
    rig.session.tail_draft = True
    requests = (Request(),)

    def anew(result: Any) -> Any:
        return SimpleNamespace(**{name: item for name, item in vars(result).items() if not name.startswith("_eagle")})

    result = rig.engine.generate(rig.engine, batch(*requests))
    rig.budget.set_state("off")
    rig.engine.process(rig.engine, batch(*requests), anew(result))
    rig.budget.set_state("on")
    rig.engine.SECONDS["target_verify"], kept = 0.5, rig.engine.SECONDS["target_verify"]
    try:
        result = rig.engine.generate(rig.engine, batch(*requests))
    finally:
        rig.engine.SECONDS["target_verify"] = kept
    rig.engine.process(rig.engine, batch(*requests), anew(result))
    assert rig.value("eagle_cycles_total") == 1
    assert rig.phases()["target_verify"] == pytest.approx(0.5)
    assert rig.value("eagle_cycles_dropped_total", "unmatched") == 1
    assert not rig.session._launched


def test_a_busy_server_looks_at_its_commands_now_and_then(rig: Rig) -> None:
    for state in ("off", "on"):
        control.write(rig.directory, [state])
        deadline = time.monotonic() + 30
        while rig.budget.state != state and time.monotonic() < deadline:
            rig.engine.cycle(batch())
        assert rig.budget.state == state


def test_off_is_seen_by_an_idle_server(rig: Rig) -> None:
    rig.tell("off")
    rig.engine.next_plan = plan([])
    rig.engine.plan(rig.engine, None)
    assert rig.value("eagle_timing_enabled", "off") == 1


def test_off_between_launch_and_result_loses_that_cycle_only(rig: Rig) -> None:
    """The overlap loop has a cycle in flight when the command comes."""
    engine, decode = rig.engine, batch()
    result = engine.generate(engine, decode)
    rig.budget.set_state("off")
    assert engine.process(engine, decode, result) == "processed"
    rig.budget.set_state("on")
    engine.cycle(batch())
    engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 2
    assert rig.value("eagle_cycles_dropped_total", "unmatched") == 1
    assert rig.errors() == {}


def test_commands_do_not_raise_hooks_that_are_down(rig: Rig) -> None:
    rig.budget.set_state("hooks_down")
    for command in ("on", "off"):
        rig.tell(command)
        rig.engine.cycle(batch())
        assert rig.value("eagle_timing_enabled", "hooks_down") == 1


def test_a_blown_cost_fuse_leaves_every_count_on(rig: Rig) -> None:
    rig.budget.set_state("fuse_cost")
    rig.engine.allocate()
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 1
    assert rig.value("eagle_accepted_tokens_total") == 2
    assert rig.value("eagle_batch_timed_cycles_total", "1", "3") == 0
    assert rig.value("eagle_timing_enabled", "fuse_cost") == 1
    # It is divided by all cycles, so it goes on as they do.
    assert rig.value("eagle_kv_allocation_host_seconds_total") > 0


def test_what_the_hooks_cost_is_counted(rig: Rig) -> None:
    rig.engine.cycle(batch())
    spent = rig.value("eagle_hook_host_seconds_total")
    assert 0 < spent < math.inf
    rig.engine.cycle(batch())
    assert rig.value("eagle_hook_host_seconds_total") > spent


# --- every role --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ROLES)
def test_every_wrapper_hands_arguments_result_and_exception_through(rig: Rig, role: str) -> None:
    given: list[tuple[Any, ...]] = []
    answer = object()

    def original(*args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        if kwargs.get("fail"):
            raise KeyError("SGLang's own")
        return answer

    wrapped = rig.session.wrapper(role)(original)
    # Arguments that none of our code understands.
    arguments = ("worker", "not a batch", "not a result")
    assert wrapped(*arguments, extra=1) is answer
    with pytest.raises(KeyError):
        wrapped(*arguments, fail=True)
    assert given == [(arguments, {"extra": 1}), (arguments, {"fail": True})]
