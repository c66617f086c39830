"""V1 in outline: one class that updates its requests inside the cycle, and frees what was rejected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from eagle_exporter import catalogue
from eagle_exporter.hooks.session import RECORD, Session
from eagle_exporter.timing.budget import Budget
from eagle_exporter.timing.cycle import CycleTimer
from tests.ranks import make_plan
from tests.unit.doubles import HandClock, histogram, make_recorder, value
from tests.unit.test_acceptance import Request
from tests.unit.test_session import Batch, Mode

COUNTER = "spec_accepted_tokens"


def request(**facts: Any) -> Request:
    made = Request(**facts)
    made.spec_accepted_tokens = made.spec_verify_ct = 0  # type: ignore[attr-defined]
    return made


class EngineV1:
    """SGLang's V1 worker in outline (0.5.6 to 0.5.11): each function takes a known time.

    Attributes:
        accepted: Draft tokens accepted of every request.
        stops: Ids of the requests that end with the first token of the next cycle.
        graph: Draft by a graph.
        later: As 0.5.12 does, the verify input travels on the batch.
        outside: A worker that leaves its requests to the processing of the result (V2's way).
    """

    SECONDS: ClassVar[dict[str, float]] = {
        "preprocess": 0.001,
        "make_batch": 0.0001,
        "forward": 0.002,
        "organise": 0.0003,
        "replay": 0.0045,
        "tree_build": 0.0005,
        "kv_verify": 0.0011,
        "between": 0.0002,
        "target_verify": 0.020,
        "accept": 0.0007,
        "free": 0.0013,
        "gather": 0.0004,
        "draft_extend": 0.003,
        "target_prefill": 0.050,
    }

    def __init__(self, session: Session, clock: HandClock, role: str = "cycle_v1") -> None:
        self.clock = clock
        self.speculative_num_steps = 3
        self.speculative_num_draft_tokens = 4
        self.accepted = 2
        self.stops: set[str] = set()
        self.graph = self.later = self.outside = False
        self.worker_steps = 3

        def wrap(role: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return session.wrapper(role)(function)

        self.preprocess = wrap("kv_prepare", lambda _: self.work("preprocess"))
        self.model_forward = wrap("draft_step", lambda: self.work("forward"))
        self.draft_forward = wrap("draft", EngineV1._draft_forward)
        self.replay = wrap("draft_graph_v1", lambda _: self.work("replay"))
        self.tree_build = wrap("tree_build", lambda: self.work("tree_build"))
        self.prepare_for_verify = wrap("kv_verify", lambda: self.work("kv_verify"))
        self.target_forward = wrap("target_verify", self._target_forward)
        self.free = wrap("kv_free", lambda: self.work("free"))
        self.accept_tokens = wrap("sample", EngineV1._accept)
        self.verify = wrap("verify_v1", EngineV1._verify)
        self.draft_extend = wrap("draft_extend", lambda: self.work("draft_extend"))
        self.generate = wrap(role, EngineV1._generate)
        self.process = wrap("accept", EngineV1._process)

    def work(self, name: str) -> None:
        self.clock.advance(self.SECONDS[name])

    def _draft_forward(self) -> None:
        for _ in range(self.speculative_num_steps - 1):
            self.model_forward()
        self.work("organise")

    def _target_forward(self, *, is_verify: bool = False) -> None:
        self.work("target_verify" if is_verify else "target_prefill")

    def _verify(self, batch: Batch, spec_info: Any = None) -> None:
        self.prepare_for_verify()
        self.work("between")
        self.target_forward(is_verify=True)
        self.accept_tokens(self, batch)

    def _accept(self, batch: Batch) -> None:
        """``EagleVerifyInput.verify``: tokens, finish, counts, then the slots."""
        self.work("accept")
        for each in batch.reqs:
            if not self.outside:
                self._append(each)
            each.spec_accepted_tokens += self.accepted  # type: ignore[attr-defined]
            each.spec_verify_ct += 1  # type: ignore[attr-defined]
        self.free()
        self.work("gather")

    def _append(self, each: Request) -> None:
        if each.rid in self.stops:
            each.output_ids.append(1)
            each.finished_reason = "stop"
        else:
            each.output_ids += [1] * (self.accepted + 1)

    def _generate(self, batch: Batch) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.target_forward()
            self.draft_extend()
            return SimpleNamespace(num_accepted_tokens=0)
        self.preprocess(self)
        self.work("make_batch")
        if self.graph:
            self.replay(self)
        else:
            self.draft_forward(self)
        self.tree_build()
        verify_input = SimpleNamespace(
            spec_steps=self.speculative_num_steps, draft_token_num=self.speculative_num_draft_tokens
        )
        if self.later:
            batch.spec_info = verify_input
            self.verify(self, batch)
        else:
            batch.spec_info = SimpleNamespace(verified_id=1)  # the draft's
            self.verify(self, batch, verify_input)
        if any(each.finished_reason is None for each in batch.reqs):
            self.draft_extend()
        if self.outside:
            accepted = [self.accepted] * len(batch.reqs)
            return SimpleNamespace(accept_lens=object(), num_correct_drafts_per_req_cpu=accepted)
        # 0.5.6 leaves the sum only, after the cut.
        return SimpleNamespace(num_accepted_tokens=sum(len(each.output_ids) for each in batch.reqs))

    def _process(self, batch: Batch, result: Any) -> str:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            for each in batch.reqs:
                each.output_ids.append(1)
        elif self.outside:
            for each in batch.reqs:
                self._append(each)
        return "processed"

    def cycle(self, batch: Batch) -> Any:
        result = self.generate(self, batch)
        assert self.process(self, batch, result) == "processed"
        assert not hasattr(result, RECORD)
        return result


class Rig:
    """A session that measures V1 in outline with a hand-moved clock."""

    def __init__(self, directory: Path, role: str = "cycle_v1") -> None:
        self.clock = HandClock(24, 64)
        self.session = Session()
        self.engine = EngineV1(self.session, self.clock, role)
        self.recorder = make_recorder(directory, make_plan(tiers=(3,)))
        self.budget = Budget(1, now=lambda: self.clock.now)
        timer = CycleTimer(self.clock, self.recorder, self.budget)
        self.session.start(timer, self.recorder, self.budget, None, recording=True)

    def value(self, name: str, *labels: str) -> float:
        self.session.flush()
        return value(self.recorder, name, *labels)

    def phases(self) -> dict[str, float]:
        self.session.flush()
        return {phase: histogram(self.recorder, "eagle_phase_duration_seconds", phase)[1] for phase in catalogue.PHASES}

    def errors(self) -> dict[str, float]:
        counts = {hook: self.value("eagle_hook_errors_total", hook) for hook in catalogue.HOOKS}
        return {hook: count for hook, count in counts.items() if count}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def batch(*requests: Request, mode: str = "decode", **facts: Any) -> Batch:
    return Batch(list(requests) or [request()], Mode(mode), **facts)


@pytest.mark.parametrize("graph", [False, True])
def test_each_function_of_a_v1_cycle_lands_in_its_phase(rig: Rig, graph: bool) -> None:
    """What is freed in the middle of accepting is the KV cache's; what surrounds it stays overhead."""
    rig.engine.graph = graph
    for _ in range(5):
        rig.engine.cycle(batch())
    phases = rig.phases()
    assert phases == pytest.approx(
        {
            "draft_steps": 5 * (0.0045 if graph else 2 * 0.002 + 0.0003),
            "target_verify": 5 * 0.020,
            "draft_extend": 5 * 0.003,
            "verify_overhead": 5 * (0.0005 + 0.0002 + 0.0007 + 0.0004),
            "kv_cache": 5 * (0.001 + 0.0011 + 0.0013),
            "other": 5 * 0.0001,
        }
    )
    assert sum(phases.values()) == pytest.approx(histogram(rig.recorder, "eagle_cycle_duration_seconds")[1], rel=1e-12)
    assert rig.errors() == {}


def test_the_parts_of_a_v1_cycle_leave_out_what_was_freed(rig: Rig) -> None:
    rig.engine.cycle(batch())
    assert rig.value("eagle_verify_overhead_part_seconds_total", "tree_build") == pytest.approx(0.0005)
    assert rig.value("eagle_verify_overhead_part_seconds_total", "sample_accept") == pytest.approx(0.0007 + 0.0004)
    assert rig.value("eagle_verify_overhead_sampled_cycles_total") == 1


def test_a_v1_result_that_waits_holds_none_of_its_requests(rig: Rig) -> None:
    rig.session._flush_at_ns = 2**63
    one = request()
    alive = weakref.ref(one)
    rig.engine.cycle(batch(one))
    del one
    gc.collect()
    assert value(rig.recorder, "eagle_cycles_total") == 0
    assert alive() is None


def test_a_cycle_in_flight_when_the_hooks_are_switched_off_holds_none_of_its_requests(rig: Rig) -> None:
    one = request()
    alive = weakref.ref(one)
    rig.engine.generate(rig.engine, batch(one))
    rig.budget.set_state("off")
    del one
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("later", [False, True], ids=["0.5.6", "0.5.12"])
def test_v1_counts_as_v2_does_also_where_a_request_stops_in_the_middle(rig: Rig, later: bool) -> None:
    engine = rig.engine
    engine.later = later
    engine.stops = {"stops"}
    stopping = request(rid="stops")
    engine.cycle(batch(request(), stopping))
    assert stopping.finished_reason == "stop"
    assert rig.value("eagle_drafts_total") == 2
    assert rig.value("eagle_accepted_tokens_total") == 4, "before the stop token cut it"
    assert rig.value("eagle_draft_tokens_total") == 6
    assert rig.value("eagle_output_tokens_total") == 3 + 1, "after it"
    assert rig.value("eagle_wasted_rows_total") == 0
    assert rig.value("eagle_spec_num_steps") == 3
    assert rig.errors() == {}


def test_v1_without_an_extend_has_no_time_for_it(rig: Rig) -> None:
    """It is skipped when every request of the batch has just finished."""
    rig.engine.stops = {"request"}
    rig.engine.cycle(batch())
    assert rig.phases()["draft_extend"] == 0.0
    assert histogram(rig.recorder, "eagle_cycle_duration_seconds")[0] == 1


def test_adaptive_steps_are_those_of_the_verify_input(rig: Rig) -> None:
    rig.engine.cycle(batch())
    rig.engine.speculative_num_steps, rig.engine.speculative_num_draft_tokens, rig.engine.accepted = 1, 2, 1
    rig.engine.cycle(batch())
    assert rig.value("eagle_spec_num_steps") == 1
    assert rig.value("eagle_draft_tokens_total") == 3 + 1


def test_a_v1_prefill_and_a_decode_that_takes_its_path_are_no_cycles(rig: Rig) -> None:
    rig.engine.cycle(batch(mode="extend"))
    rig.engine.cycle(batch(is_extend_in_batch=True))
    assert rig.value("eagle_cycles_total") == 0
    assert rig.value("eagle_cycles_excluded_total", "prefill_path") == 1
    assert histogram(rig.recorder, "eagle_prefill_phase_duration_seconds", "target_prefill")[0] == 1
    assert rig.value("eagle_output_tokens_total") == 2
    assert rig.errors() == {}


def test_freeing_outside_a_cycle_or_while_slots_are_addressed_opens_nothing(rig: Rig) -> None:
    rig.engine.free()
    original = rig.engine.preprocess
    rig.engine.preprocess = rig.session.wrapper("kv_prepare")(lambda _: rig.engine.free())
    rig.engine.cycle(batch())
    rig.engine.preprocess = original
    assert rig.phases()["kv_cache"] == pytest.approx(0.0013 + 0.0011 + 0.0013)
    assert rig.errors() == {}


def test_a_health_check_of_v1_is_left_out(rig: Rig) -> None:
    rig.engine.cycle(batch(request(rid="HEALTH_CHECK_1")))
    assert rig.value("eagle_cycles_total") == 0
    assert rig.value("eagle_cycles_excluded_total", "health_check") == 1
    assert rig.value("eagle_output_tokens_total") == 0


def test_an_error_of_ours_at_the_launch_costs_the_cycle_and_no_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("our own")

    with monkeypatch.context() as patch:
        patch.setattr(CycleTimer, "open", broken)
        rig.engine.cycle(batch())
    rig.engine.cycle(batch())
    assert rig.value("eagle_cycles_total") == 1
    assert rig.value("eagle_accepted_tokens_total") == 2
    assert rig.errors() == {"cycle": 1}


# --- a worker that nobody knows ------------------------------------------------------------------------------
@pytest.mark.parametrize("outside", [False, True], ids=["updates its requests", "leaves them to the scheduler"])
def test_a_generic_worker_is_counted_whichever_way_it_goes(tmp_path: Path, outside: bool) -> None:
    rig = Rig(tmp_path, "cycle_generic")
    rig.engine.outside = outside
    rig.engine.stops = {"stops"}
    rig.engine.cycle(batch(request(), request(rid="stops")))
    assert rig.value("eagle_drafts_total") == 2
    assert rig.value("eagle_accepted_tokens_total") == 4
    assert rig.value("eagle_output_tokens_total") == 3 + 1
    assert rig.errors() == {}


def test_a_generic_worker_under_overlap_wastes_the_rows_that_had_finished(tmp_path: Path) -> None:
    """They were still running when the cycle was launched: what counts is when its result is processed."""
    rig = Rig(tmp_path, "cycle_generic")
    engine = rig.engine
    engine.outside = True
    current = batch(request(), request(rid="stops"))
    first = engine.generate(engine, current)
    second = engine.generate(engine, current)
    engine.stops = {"stops"}
    engine.process(engine, current, first)
    engine.process(engine, current, second)
    assert rig.value("eagle_drafts_total") == 3
    assert rig.value("eagle_wasted_rows_total") == 1
    assert rig.value("eagle_accepted_tokens_total") == 6
    assert rig.errors() == {}


def test_of_a_generic_worker_all_but_one_of_the_verified_tokens_may_be_accepted(tmp_path: Path) -> None:
    """What it calls a step is not known: UNO says 1 where it verifies many (0.5.20 and newer)."""
    rig = Rig(tmp_path, "cycle_generic")
    for facts in ({}, {"speculative_num_steps": 1}, {"speculative_num_steps": None}):
        assert rig.session._steps_of(SimpleNamespace(speculative_num_draft_tokens=8, **facts)) == (7, 8)


def test_where_the_verify_input_is_not_seen_the_worker_says_its_steps_after_switching_them(tmp_path: Path) -> None:
    """Adaptive steps are switched at the start of a cycle: what the worker says before it is the last cycle's."""
    rig = Rig(tmp_path)
    rig.session.steps_from_worker = True
    engine = rig.engine
    original = engine.preprocess

    def switching(worker: Any) -> None:
        engine.speculative_num_steps, engine.speculative_num_draft_tokens = 1, 2
        original(worker)

    engine.preprocess = switching
    engine.verify = EngineV1._verify
    engine.accepted = 1
    engine.cycle(batch())
    assert rig.value("eagle_spec_num_steps") == 1
    assert rig.value("eagle_draft_tokens_total") == 1
