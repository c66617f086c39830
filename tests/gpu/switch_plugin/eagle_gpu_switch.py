"""A plugin for measuring the exporter on a GPU: changes at run time what is measured, inside SGLang's scheduler.

Commands come as JSON in the file named by EAGLE_GPU_SWITCH. Each tensor-parallel rank reads it for itself and obeys
while its scheduler is idle; the answer of rank n goes to the same name with ``.done.n``. Whoever sends a command
waits for the answers of all ranks before the next request, so no rank serves one in another mode than the others.
Nothing of this runs while requests are served, except what a command asks for.

A plant is a fault: ``plant`` names the place (`PLANTS`), ``plant_ranks`` the ranks (None: all), ``plant_cycles`` the
length of an extra kernel in GPU cycles, ``plant_seconds`` the seconds that the host sleeps instead. Without a GPU the
kernel is a sleep too, a nanosecond a cycle.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
import traceback
from typing import Any, ClassVar

PATH = os.environ.get("EAGLE_GPU_SWITCH", "")
_DRAFT_EXTEND = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode"
PLANTS = {
    "kv_cache": "sglang.srt.speculative.eagle_worker_common.prepare_for_draft",
    "draft_steps": "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
    "verify_overhead": "sglang.srt.speculative.eagle_utils.eagle_sample",
    "target_verify": "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    "draft_extend": _DRAFT_EXTEND,
    "after_draft_extend": _DRAFT_EXTEND,
    "before_cycle": "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    "result": "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
}
"""Place -> function of SGLang: a fault is planted before it, in a place whose name begins with ``after`` behind it. No
collective follows in a cycle ``after_draft_extend``. Between two cycles the schedulers of a group meet where
requests are handed round: ``result`` is before that (it belongs to the cycle before last with the overlap
scheduler), ``before_cycle`` behind it."""
HOOK_METHODS = (
    "begin_cycle",
    "end_cycle",
    "note_verify",
    "collect_draft_steps",
    "note_replay",
    "before_result",
    "after_result",
    "flush",
    "note_plan",
)


WATCHED = {
    "session": (*HOOK_METHODS, "_poll_control"),
    "timer": ("open", "mark", "close", "launch_verify", "drain", "_times"),
    "clock": ("acquire", "mark", "done", "reached", "offsets", "between"),
    "recorder": ("add_cycles", "commit", "add_output_tokens"),
}
"""Methods of ours that ``watch_parts`` times where they run."""


class State:
    """What the commands have set."""

    rank = 0
    plant = ""
    plant_cycles = 0
    plant_seconds = 0.0
    plant_sync = False
    sequence = -1
    mode = "on"
    next_look = 0.0
    records: list[dict[str, Any]] | None = None
    profiler: Any = None
    profiled: ClassVar[list[dict[str, Any]]] = []
    costs: ClassVar[list[float]] = []
    mark_costs: ClassVar[dict[str, list[int]]] = {}
    part_costs: ClassVar[dict[str, int]] = collections.defaultdict(int)
    part_calls: ClassVar[dict[str, int]] = collections.defaultdict(int)
    part_cycles = 0.0
    automatic: Any = None
    watched: ClassVar[list[tuple[Any, str, Any]]] = []
    device_times: ClassVar[dict[str, float]] = collections.defaultdict(float)
    keep_totals = False
    fail_profiler = False
    profiler_totals: ClassVar[dict[str, Any]] = {}


def register() -> None:
    """Plant the faults' places, and look for commands in the scheduler's loop."""
    if not PATH:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _keep_multicast_off()

    def planter(places: list[str]) -> Any:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            if "target_verify" in places and not kwargs.get("is_verify"):
                return original(*args, **kwargs)
            if State.plant_sync and "kv_cache" in places:
                batch = next(a for a in args if hasattr(a, "seq_lens"))
                batch.seq_lens.sum().item()
            if State.plant not in places:
                return original(*args, **kwargs)
            if State.plant.startswith("after"):
                result = original(*args, **kwargs)
                _delay()
                return result
            _delay()
            return original(*args, **kwargs)

        return around

    for target in dict.fromkeys(PLANTS.values()):
        places = [place for place, where in PLANTS.items() if where == target]
        HookRegistry.register(target, planter(places), HookType.AROUND)

    def look(plan: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> Any:
        if getattr(plan, "batch_to_run", plan) is None:
            now = time.monotonic()
            if now > State.next_look:
                State.next_look = now + 0.002
                _obey(scheduler)
        return plan

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run", look, HookType.AFTER)


def _keep_multicast_off() -> None:
    """Let SGLang gather its logits with NCCL where NVLink multicast must stay off.

    From 0.5.16 on several ranks gather them through a multicast buffer (``MultimemAllGatherer`` in
    ``distributed/device_communicators/triton_symm_mem_ag.py``), and no argument switches that off.
    """
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        return
    try:
        from sglang.srt.distributed.device_communicators.triton_symm_mem_ag import MultimemAllGatherer
    except ImportError:
        return
    MultimemAllGatherer._build = lambda _self, _x: None


def _delay() -> None:
    if State.plant_cycles:
        _kernel(State.plant_cycles)
    if State.plant_seconds:
        time.sleep(State.plant_seconds)


def _kernel(cycles: int) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)
    else:
        time.sleep(cycles * 1e-9)


def _obey(scheduler: Any) -> None:
    try:
        with open(PATH) as file:
            command = json.load(file)
    except (OSError, ValueError):
        return
    if command["sequence"] == State.sequence:
        return
    from eagle_exporter.hooks.identity import rank_of

    State.sequence = command["sequence"]
    State.rank = rank_of(scheduler).tp_rank
    try:
        answer = _run(command, scheduler) or {}
    except Exception:
        answer = {"error": traceback.format_exc()}
    done = f"{PATH}.done.{State.rank}"
    with open(done + ".new", "w") as file:
        json.dump({"sequence": State.sequence, "rank": State.rank, "mode": State.mode, **answer}, file)
    os.replace(done + ".new", done)


def _run(command: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    from eagle_exporter.hooks import plugin

    session, hooks = plugin.active[0] if plugin.active else (None, None)
    answer: dict[str, Any] = {}
    if "mode" in command:
        _set_mode(command["mode"], session, hooks, scheduler)
    if "plant" in command:
        ranks = command.get("plant_ranks")
        State.plant = command["plant"] if command["plant"] and (ranks is None or State.rank in ranks) else ""
        State.plant_cycles = int(command.get("plant_cycles", 0))
        State.plant_seconds = float(command.get("plant_seconds", 0.0))
    if "plant_sync" in command:
        State.plant_sync = bool(command["plant_sync"])
    if "calibrate" in command:
        answer["sleep_seconds"] = _calibrate(int(command["calibrate"]))
    if command.get("record"):
        _start_recording(session)
    if command.get("profile"):
        _profile_window(session, *command["profile"])
    if command.get("strict_sync"):
        _forbid_synchronisation(session)
    if command.get("profiled_records"):
        answer["records"] = State.profiled
    if command.get("take_records"):
        answer["records"] = State.records
        State.records = None
    if command.get("device_times"):
        answer["device_times"] = dict(State.device_times)
        State.device_times.clear()
    if command.get("costs"):
        answer["costs"] = State.costs[:]
        State.costs.clear()
    if command.get("watch_marks"):
        _watch_marks(session)
    if command.get("mark_costs"):
        answer["mark_costs"] = State.mark_costs
    if command.get("watch_parts"):
        _watch_parts(session)
    if command.get("part_costs"):
        answer["part_costs"] = _part_costs(session)
    if command.get("keep_profiler_totals"):
        _keep_profiler_totals()
    if command.get("take_profiler_totals"):
        answer["profiler_totals"] = State.profiler_totals
        State.keep_totals = False
    if "fail_profiler" in command:
        _wrap_profiler()
        State.fail_profiler = bool(command["fail_profiler"])
    if command.get("parts"):
        answer["parts"] = _measure_parts(session)
    if session is not None:
        answer["sample_every"] = session.budget.sample_every
        answer["state"] = session.budget.state
        if session.graph_events is not None:
            answer["draft_graphs"] = sorted(session.graph_events.graphs)
    return answer


def _keep_profiler_totals() -> None:
    """Let the next profile note what it adds up to itself."""
    _wrap_profiler()
    State.keep_totals = True
    State.profiler_totals = {}


def _wrap_profiler() -> None:
    """Let torch's profiler fail, or note its totals, when it is told so; wrapped once."""
    import torch

    profile: Any = torch.profiler.profile
    if hasattr(profile, "eagle_gpu_wrapped"):
        return
    profile.eagle_gpu_wrapped = True
    start, stop = profile.start, profile.stop

    def failing_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        if State.fail_profiler:
            raise RuntimeError("planted in start")
        return start(self, *args, **kwargs)

    def telling_stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = stop(self, *args, **kwargs)
        if State.keep_totals:
            cuda = torch.cuda.is_available()
            own = [event for event in self.events() if _is_work(event, cuda)]
            attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
            State.profiler_totals = {
                "seconds": sum(getattr(event, attribute) for event in own) / 1e6,
                "count": len(own) if cuda else len(self.profiler.kineto_results.events()),
            }
        return returned

    profile.start, profile.stop = failing_start, telling_stop


def _is_work(event: Any, cuda: bool) -> bool:
    if getattr(event, "is_user_annotation", False):
        return False
    return not cuda or str(event.device_type) == "DeviceType.CUDA"


def _runners(scheduler: Any) -> list[Any]:
    draft = getattr(scheduler.draft_worker, "draft_worker", None)
    return [runner for runner in (scheduler.tp_worker.model_runner, getattr(draft, "draft_runner", None)) if runner]


def _set_mode(mode: str, session: Any, hooks: Any, scheduler: Any) -> None:
    from eagle_exporter.hooks.plugin import make_clock
    from eagle_exporter.timing.budget import Budget
    from eagle_exporter.timing.cycle import CycleTimer

    while State.watched:
        setattr(*State.watched.pop())
    want_timer = "device_timer" in mode
    for runner in _runners(scheduler):
        if want_timer:
            from sglang.srt.utils.device_timer import DeviceTimer

            runner.device_timer = DeviceTimer(reporter=_report_device_time)
        elif State.mode.find("device_timer") >= 0:
            runner.device_timer = None
    State.mode = mode
    if session is None:
        return
    if mode in ("raw", "device_timer"):
        hooks.undo()
        return
    for patch in hooks.patches:
        patch.redo()
    clock = mode if mode in ("host", "sync") else "auto"
    sample_every = None if mode == "auto" else 1
    # As shipped is as a server that has found its sampling: it keeps the budget it had.
    budget = State.automatic if mode == "auto" and State.automatic is not None else Budget(sample_every)
    if mode == "auto":
        State.automatic = budget
    if sample_every == 1:
        budget.spent = lambda *_, **__: None  # type: ignore[method-assign]  # a measurement of the cost must not be ended by the fuse
    _watch_costs(session)
    previous = session.timer
    timer = CycleTimer(make_clock(clock), session.recorder, budget)
    timer.graph_mean = previous.graph_mean
    if not hasattr(session, "all_graph_events"):
        session.all_graph_events = session.graph_events
    session.graph_events = session.all_graph_events if clock == "auto" else None
    session.start(timer, session.recorder, budget, session.control, recording=session.recording)
    budget.set_state("off" if mode == "off" else "on")
    session.recorder.set_state(budget.state)


def _watch_costs(session: Any) -> None:
    """Note the host time per cycle of each flush."""
    if hasattr(session, "original_flush"):
        return
    recorder = session.recorder
    session.original_flush, original_cost = session.flush, recorder.add_host_cost
    last = [0.0]

    def add_host_cost(seconds: float) -> None:
        last[0] = seconds
        original_cost(seconds)

    def flush() -> None:
        count = len(session._results)
        session.original_flush()
        if count >= 8:
            State.costs.append(last[0] / count)

    recorder.add_host_cost, session.flush = add_host_cost, flush


def _report_device_time(t: float, category: str, **_: Any) -> None:
    State.device_times[category] += t
    State.device_times[category + ".count"] += 1


def _calibrate(cycles: int) -> float:
    """Seconds of an extra kernel, the event pair around it included."""
    import torch

    if not torch.cuda.is_available():
        taken = []
        for _ in range(5):
            begin = time.perf_counter()
            _kernel(cycles)
            taken.append(time.perf_counter() - begin)
        return min(taken)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for _ in range(20):
        start.record()
        _kernel(cycles)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return float(sorted(samples)[10])


def _start_recording(session: Any) -> None:
    recorder = session.recorder
    State.records = []
    if hasattr(recorder, "original_add_cycles"):
        return
    recorder.original_add_cycles = recorder.add_cycles

    def add_cycles(cycles: Any) -> None:
        recorder.original_add_cycles(cycles)
        for cycle in cycles if State.records is not None else ():
            add_cycle(*cycle)

    def add_cycle(record: Any, acceptance: Any, times: Any) -> None:
        if State.records is not None and acceptance.excluded is None:
            entry = {
                "rows": record.rows,
                "num_steps": record.num_steps,
                "num_draft_tokens": record.num_draft_tokens,
                "accepted": list(acceptance.correct_drafts),
                "context": list(acceptance.context_tokens),
                "wasted": acceptance.wasted_rows,
                "host_bound": record.host_bound,
            }
            if times is not None:
                entry |= {
                    "cycle": times.cycle,
                    "phases": times.phases,
                    "host": times.host,
                    "gap": times.gap,
                    "steps": list(times.steps),
                    "parts": times.parts,
                }
            State.records.append(entry)

    recorder.add_cycles = add_cycles


class Offsets:
    """What a clock says of chosen slots, read when they are given back: results are recorded while cycles run."""

    def __init__(self, clock: Any) -> None:
        """Watch a clock."""
        self._clock = clock
        self._wanted: dict[int, tuple[Any, int]] = {}
        self._found: dict[int, list[float]] = {}
        release = clock.release

        def reading(slot: Any) -> None:
            self._read(slot)
            release(slot)

        clock.release = reading

    def watch(self, slot: Any, number: int) -> None:
        """Want the offsets of a slot, under a number."""
        self._wanted[id(slot)] = (slot, number)

    def _read(self, slot: Any) -> None:
        _, number = self._wanted.pop(id(slot), (None, None))
        if number is not None and self._clock.done(slot):
            self._found[number] = list(self._clock.offsets(slot))

    def finish(self) -> dict[int, list[float]]:
        """Stop watching; return offsets by number, of those slots too whose marks have all happened by now."""
        for slot, _ in list(self._wanted.values()):
            self._read(slot)
        del self._clock.release
        return self._found


def _profile_window(session: Any, first: int, cycles: int, path: str) -> None:
    """Profile `cycles` decode cycles from number `first` on, each interval of a cycle in a range of its own."""
    import torch
    from torch.profiler import ProfilerActivity

    from eagle_exporter.timing import cycle as kinds

    timer = session.timer
    offsets_of = Offsets(timer.clock)
    State.profiled = []
    count = 0
    ranges: list[Any] = []
    inside: list[Any] = []
    original_open, original_close, original_mark, original_relabel = timer.open, timer.close, timer.mark, timer.relabel

    def begin(kind: int) -> None:
        span = torch.profiler.record_function(f"eagle:{len(inside) - 1}:{kinds.phase_of(kind)}")
        span.__enter__()
        ranges.append(span)

    def end() -> None:
        while ranges:
            ranges.pop().__exit__(None, None, None)

    def open_cycle(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == first:
            State.profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            State.profiler.start()
        record = original_open(*args)
        if State.profiler is not None:
            record.parts = False
            inside.append(record)
            begin(record.kinds[-1])
        return record

    def mark(kind: int) -> None:
        if State.profiler is not None:
            end()
        original_mark(kind)
        if State.profiler is not None:
            begin(kind)

    def relabel(kind: int) -> None:
        original_relabel(kind)
        if State.profiler is not None:
            end()
            begin(kind)

    def close(record: Any) -> None:
        end()
        original_close(record)
        if State.profiler is not None and record.slot is not None:
            offsets_of.watch(record.slot, len(inside) - 1)
        if State.profiler is not None and len(inside) == cycles:
            torch.cuda.synchronize()
            State.profiler.stop()
            State.profiler.export_chrome_trace(path)
            State.profiler = None
            for name in ("open", "close", "mark", "relabel"):
                delattr(timer, name)
            found = offsets_of.finish()
            for number, cycle in enumerate(inside):
                offsets = found.get(number)
                times = kinds.split(offsets, cycle.kinds, [0] * len(offsets)) if offsets else None
                if times is not None:
                    State.profiled.append(
                        {"phases": times.phases, "cycle": times.total, "host_bound": cycle.host_bound}
                    )
                else:
                    State.profiled.append({})

    timer.open, timer.close, timer.mark, timer.relabel = open_cycle, close, mark, relabel


def _forbid_synchronisation(session: Any) -> None:
    import torch

    def strict(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    # Spans mark the timer themselves, so the timer is covered too.
    for name in HOOK_METHODS:
        setattr(session, name, strict(getattr(session, name)))
    for name in ("mark", "open", "close", "complete", "drain", "open_prefill", "launch_verify"):
        setattr(session.timer, name, strict(getattr(session.timer, name)))


def _watch_marks(session: Any) -> None:
    """Time each event record where it happens, between SGLang's launches."""
    clock = session.timer.clock
    original = clock.mark
    now = time.perf_counter_ns

    def mark(slot: Any, moment: int) -> None:
        begin = now()
        original(slot, moment)
        State.mark_costs.setdefault(str(slot.count), []).append(now() - begin)

    clock.mark = mark


def _watch_parts(session: Any) -> None:
    """Time each part of the hooks' work where it happens; the times of outer parts hold those of inner ones."""
    timer, now = session.timer, time.perf_counter_ns

    def watch(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            try:
                return original(*args, **kwargs)
            finally:
                State.part_costs[key] += now() - begin
                State.part_calls[key] += 1

        setattr(owner, name, watched)
        State.watched.append((owner, name, original))

    for owner, kind in (
        (session, "session"),
        (timer, "timer"),
        (timer.clock, "clock"),
        (timer.recorder, "recorder"),
    ):
        for name in WATCHED[kind]:
            watch(owner, name, f"{kind}.{name}")
    State.part_cycles = _cycles(session)


def _part_costs(session: Any) -> dict[str, list[float]]:
    """Return for each part its microseconds and calls per cycle since the last call."""
    cycles = _cycles(session)
    count = max(cycles - State.part_cycles, 1.0)
    State.part_cycles = cycles
    costs = {
        key: [round(value / count / 1e3, 2), round(State.part_calls[key] / count, 3)]
        for key, value in State.part_costs.items()
    }
    State.part_costs.clear()
    State.part_calls.clear()
    return costs


def _cycles(session: Any) -> float:
    recorder = session.recorder
    return float(recorder.values[recorder._cycles])


def _measure_parts(session: Any) -> dict[str, float]:
    """Microseconds of one timed cycle's parts, in a hot loop in this very process."""
    import torch

    clock = session.timer.clock
    now = time.perf_counter_ns
    stream = torch.cuda.current_stream()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    for event in events:
        event.record(stream)
    torch.cuda.synchronize()

    def loop(function: Any, times: int = 300) -> float:
        begin = now()
        for _ in range(times):
            function()
        return (now() - begin) / times / 1e3

    parts = {
        "current_stream": loop(torch.cuda.current_stream),
        "record_8": loop(lambda: [event.record(stream) for event in events]),
        "query": loop(events[0].query),
    }
    torch.cuda.synchronize()
    parts["elapsed_7"] = loop(lambda: [events[0].elapsed_time(event) for event in events[1:]])
    parts["commit"] = loop(session.recorder.commit)
    slot = clock.acquire()
    if slot is not None:
        clock.mark(slot, now())
        clock.release(slot)
    return parts


if __name__ == "__main__":
    sys.exit("load it as an SGLang plugin")
