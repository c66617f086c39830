"""The running hooks of one scheduler process.

Every wrapper follows one rule: SGLang's function is called exactly once with exactly its arguments, its result or
exception passes through untouched, and whatever goes wrong in our own code is caught, counted, and logged once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from eagle_exporter.control import Control
from eagle_exporter.hooks.acceptance import RowsBefore, correct_drafts
from eagle_exporter.hooks.draft_graph import DraftGraphEvents
from eagle_exporter.timing import cycle as kinds
from eagle_exporter.timing.budget import Budget
from eagle_exporter.timing.cycle import Acceptance, CycleRecord, CycleTimer
from eagle_exporter.timing.recorder import RankRecorder

if TYPE_CHECKING:
    from eagle_exporter.hooks.capture import Captures

logger = logging.getLogger("eagle_exporter")

RECORD = "_eagle_exporter_cycle"
"""Attribute by which a cycle travels on SGLang's ``GenerationBatchResult``."""

_IDLE_POLL_SECONDS = 0.25
POLL_NS = 50_000_000
"""The control file is looked at before a batch when that was so long ago: a system call costs 2 to 10 µs."""
LOOK_EVERY = 8
"""Every how many batches the number of running requests is looked at."""
_NO_MODE = object()
_UNKNOWN_STEPS = -1
"""Draft steps of a cycle, until the verify input or the worker says them."""
FLUSH_RESULTS = 64
"""Results that are recorded together; the clock's pool holds some more cycles than that."""
FLUSH_ROWS = 1024
"""Fewer results, where they have so many rows: the server waits while they are recorded."""
FLUSH_NS = 500_000_000
"""Results wait no longer than this while the server is busy, and not at all once it is idle."""

_IDLE = Acceptance(excluded="idle")
_NO_DRAFTS = Acceptance(excluded="prefill_path")

Function = Callable[..., Any]


class Session:
    """Wrappers around SGLang's functions, and what they share.

    Until `start` the wrappers pass everything through: SGLang runs warm-up and graph capture while the scheduler is
    being made, and the rank's file exists only once its configuration is known.
    """

    def __init__(self) -> None:
        """Make a session that does nothing yet."""
        self.timer: CycleTimer | None = None
        self.recorder: RankRecorder | None = None
        self.budget = Budget()
        self.control: Control | None = None
        self.graph_events: DraftGraphEvents | None = None
        self.captures: Captures | None = None
        self.recording = False
        self.plain_decode = False
        self.rows_at_launch = False
        """The worker may update the requests itself, so they are looked at before it."""
        self.steps_from_worker = False
        """The verify input is not seen (no hook `verify`): the worker says how many steps are in force."""
        self.counts_no_steps = False
        """The worker need not draft step by step (NGRAM, DFLASH): up to one token less than it verifies is accepted."""
        self.tail_draft = False
        """The next cycle is drafted at the end of this one (pipeline parallelism, 0.5.21 and newer)."""
        self._launched: deque[tuple[CycleRecord, Sequence[Any]]] = deque(maxlen=kinds.MAX_PENDING)
        self._open = False
        self._poll_at_ns = 0
        self._plans_to_look = 0
        self._decode_mode: Any = _NO_MODE
        self._logged: set[str] = set()
        self._idle_poll = 0.0
        self._draft_steps_left = 0
        self._draft_step = 0
        self._error_counts: dict[str, int] = {}
        self._results: list[tuple[CycleRecord, RowsBefore, Sequence[int] | None]] = []
        self._waiting_rows = 0
        self._appended = 0
        self._allocation_ns = 0
        self._spent_ns = 0
        self._flush_at_ns = 0
        self._flush_results = FLUSH_RESULTS

    def start(
        self, timer: CycleTimer, recorder: RankRecorder, budget: Budget, control: Control | None, *, recording: bool
    ) -> None:
        """Begin to measure.

        Args:
            timer: Takes the cycles.
            recorder: Counts them.
            budget: Decides which are timed.
            control: Commands, None when there is no control file.
            recording: This rank counts acceptance.
        """
        self.budget = budget
        self.control = control
        self.recording = recording
        self.recorder = recorder
        self.timer = timer
        for hook, count in self._error_counts.items():
            for _ in range(count):
                recorder.error(hook)
        budget.on_change = self._state_changed
        recorder.commit()

    def wrapper(self, role: str) -> Callable[[Function], Function]:
        """Return the wrapper of a hook point's role."""
        return getattr(self, f"_wrap_{role}")  # type: ignore[no-any-return]

    # --- errors and commands -----------------------------------------------------------------------------
    def failed(self, hook: str, record: CycleRecord | None = None) -> None:
        """Note an exception of ours: count it, log it once per hook, give up the cycle's times. Never raises."""
        try:
            timer = self.timer
            if timer is not None:
                timer.fail(record)
            if self.recorder is not None:
                self.recorder.error(hook)
            else:
                self._error_counts[hook] = self._error_counts.get(hook, 0) + 1
            self.budget.error()
            if hook == "scheduler":
                self.do_not_wait()
            if hook not in self._logged:
                self._logged.add(hook)
                logger.exception(
                    "eagle-exporter: hook %r failed; SGLang is not affected. Further failures of it are only counted, "
                    "in eagle_hook_errors_total",
                    hook,
                )
        except Exception:  # noqa: S110 - nothing is left to tell it to
            pass

    def _state_changed(self, state: str) -> None:
        recorder = self.recorder
        if not self.budget.counting:
            self._launched.clear()  # their results pass unseen, and must not be taken for later ones
        if recorder is not None:
            recorder.set_state(state)
            self.flush()
        if not self.budget.counting and self.timer is not None:
            self.timer.give_up()
        logger.warning("eagle-exporter: timing is %s", state)

    def do_not_wait(self) -> None:
        """Record each result as it comes: nobody will tell when the scheduler is idle and the rest should go out."""
        self._flush_results = 1

    def _poll_control(self) -> None:
        if self.control is not None:
            commands = self.control.changed()
            if commands is not None:
                self._obey(commands)

    def _obey(self, commands: list[str]) -> None:
        words = [command.split()[0] for command in commands]
        if self.budget.state != "hooks_down":
            if "off" in words:
                self.budget.set_state("off")
            elif "on" in words:
                self.budget.set_state("on")
        if self.captures is not None:
            self.captures.obey(commands)

    # --- the cycle ---------------------------------------------------------------------------------------
    def _wrap_cycle(self, original: Function) -> Function:
        """A worker's ``forward_batch_generation`` is one cycle, or a prefill."""

        def forward_batch_generation(worker: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass's method that calls super() must not open a second cycle.
            if self._open or self.timer is None:
                return original(worker, *args, **kwargs)
            record = batch = None
            try:
                batch = args[0] if args else _batch_of(kwargs)
                record = self.begin_cycle(batch)
            except Exception:
                self.failed("cycle")
            if record is None:
                return original(worker, *args, **kwargs)
            self._open = True
            try:
                result = original(worker, *args, **kwargs)
            except BaseException:
                self._abandon(record)
                raise
            finally:
                self._open = False
            try:
                self.end_cycle(record, result, worker, batch)
            except Exception:
                self.failed("cycle", record)
            return result

        return forward_batch_generation

    def _wrap_cycle_v1(self, original: Function) -> Function:
        """V1 updates the requests inside the cycle (``EagleVerifyInput.verify``), not when the result is processed."""
        self.rows_at_launch = True
        return self._wrap_cycle(original)

    def _wrap_cycle_generic(self, original: Function) -> Function:
        """A worker that nobody knows may be of either kind, and its verify input of any."""
        self.steps_from_worker = self.counts_no_steps = True
        return self._wrap_cycle_v1(original)

    def _wrap_plain_cycle(self, original: Function) -> Function:
        """Without speculation one forward of the target, with its sampling, is the whole cycle."""
        return self._wrap_cycle(original)

    def _wrap_plain_forward(self, original: Function) -> Function:
        """Without speculation the model's forward is the target's, and sampling follows it."""
        return self._plain_span("target_verify", kinds.TARGET_VERIFY, kinds.VERIFY_OVERHEAD)(original)

    def begin_cycle(self, batch: Any) -> CycleRecord | None:
        """Open the cycle or prefill of a batch; None when it is not measured."""
        timer = self.timer
        assert timer is not None
        now = perf_counter_ns()
        if now >= self._poll_at_ns:
            self._poll_at_ns = now + POLL_NS
            self._poll_control()
        if not self.budget.counting:
            timer.interrupt()
            return None
        mode = batch.forward_mode
        # Asking a mode takes two calls into SGLang, and nearly every batch has the mode of the one before.
        if mode is not self._decode_mode:
            if mode.is_idle():
                # An idle rank takes part in the collectives of the others; its result never has accept lengths.
                timer.interrupt()
                assert self.recorder is not None
                self.recorder.add_cycle(CycleRecord(0, 0, 0), _IDLE, None)
                return None
            if mode.is_extend():
                return timer.open_prefill()
            self._decode_mode = mode
        before = RowsBefore(batch.reqs, counters=True) if self.rows_at_launch else None
        previous = timer.last_opened
        try:
            record = timer.open(len(batch.reqs), _UNKNOWN_STEPS, 0)
        except Exception:  # it costs the times, and no count
            if timer.last_opened is None or timer.last_opened is previous:
                raise
            record = timer.last_opened
            self.failed("cycle", record)
        if before is not None:
            record.before = before
        # With data parallelism a decode rank may take the prefill path when another rank prefills.
        if getattr(batch, "is_extend_in_batch", False):
            record.beside_prefill = True
        return record

    def _steps_of(self, worker: Any) -> tuple[int, int]:
        """Return the draft steps and the tokens verified per request by the worker's own word."""
        if self.plain_decode:
            return 0, 1
        tokens = getattr(worker, "speculative_num_draft_tokens", None) or 1
        steps = None if self.counts_no_steps else getattr(worker, "speculative_num_steps", None)
        return int(tokens - 1 if steps is None else steps), int(tokens)

    def end_cycle(self, record: CycleRecord, result: Any, worker: Any, batch: Any) -> None:
        """Close a cycle and let it travel on its result."""
        timer = self.timer
        assert timer is not None
        if record.slot is None and timer.budget.countdown > 1:
            timer.current = None  # as `close` would: most cycles come this way
        else:
            try:
                timer.close(record)
            except Exception:  # it costs the times, and no count
                self.failed("cycle", record)
        if record.before is not None and not record.before.updated():
            record.before = None
        if record.beside_prefill and record.before is None and getattr(result, "accept_lens", None) is None:
            # It took the prefill path: the next cycle does not follow a cycle.
            timer.interrupt()
        if (self.steps_from_worker or record.num_steps == _UNKNOWN_STEPS) and not record.prefill:
            # The step count may have been switched at the start of this cycle.
            record.num_steps, record.num_draft_tokens = self._steps_of(worker)
        setattr(result, RECORD, record)
        if self.tail_draft:
            self._launched.append((record, batch.reqs[:]))

    def _abandon(self, record: CycleRecord) -> None:
        try:
            assert self.timer is not None
            self.timer.discard(record)
        except Exception:
            self.failed("cycle")

    def _wrap_verify(self, original: Function) -> Function:
        def verify(worker: Any, *args: Any, **kwargs: Any) -> Any:
            if self._open and self.timer is not None:
                try:
                    self.note_verify((args[0] if args else kwargs["batch"]).spec_info)
                except Exception:
                    self.failed("verify")
            return original(worker, *args, **kwargs)

        return verify

    def _wrap_verify_v1(self, original: Function) -> Function:
        """Until 0.5.11 V1 hands the verify input over beside the batch, which still has the draft's."""

        def verify(worker: Any, *args: Any, **kwargs: Any) -> Any:
            if self._open and self.timer is not None:
                try:
                    verify_input = args[1] if len(args) > 1 else kwargs.get("spec_info")
                    if verify_input is None:
                        verify_input = (args[0] if args else kwargs["batch"]).spec_info
                    self.note_verify(verify_input)
                except Exception:
                    self.failed("verify")
            return original(worker, *args, **kwargs)

        return verify

    def note_verify(self, verify_input: Any) -> None:
        """Take the step count in force from the verify input: adaptive steps may have switched in this cycle."""
        timer = self.timer
        assert timer is not None
        record = timer.last_opened
        if record is None:
            return
        # Both or none: half of it would count fewer drafts than none.
        record.num_steps, record.num_draft_tokens = int(verify_input.spec_steps), int(verify_input.draft_token_num)
        current = timer.current
        if current is not None and current.kinds[-1] == kinds.OTHER:
            # No drafting in this cycle (zero steps, or drafted at the end of the last one): what happened since its
            # start prepared the verify.
            timer.relabel(kinds.VERIFY_OVERHEAD)

    # --- spans in a cycle --------------------------------------------------------------------------------
    # These run in every cycle, between launches, with the caches full of SGLang: each Python frame costs there three to
    # four times what it costs in a loop. So a plain span marks its two boundaries right in the wrapper.
    def _plain_span(self, hook: str, inside: int, after: int) -> Callable[[Function], Function]:
        """Return a wrapper: from its entry on it is `inside`, from its exit on `after`."""

        def wrap(original: Function) -> Function:
            def span(*args: Any, **kwargs: Any) -> Any:
                timer = self.timer
                if timer is None or timer.current is None:
                    return original(*args, **kwargs)
                try:
                    timer.mark(inside)
                except Exception:
                    self.failed(hook)
                result = original(*args, **kwargs)
                try:
                    timer.mark(after)
                except Exception:
                    self.failed(hook)
                return result

            return span

        return wrap

    def _part_span(self, hook: str, inside: int, *, shared: bool = False) -> Callable[[Function], Function]:
        """Return a wrapper for a part of the verify overhead, measured in some cycles only.

        Args:
            hook: Logical name.
            inside: The part.
            shared: Nothing is enqueued before it since the last mark, so it shares that one.
        """

        def wrap(original: Function) -> Function:
            def span(*args: Any, **kwargs: Any) -> Any:
                timer = self.timer
                if timer is None or timer.current is None or not timer.current.parts:
                    return original(*args, **kwargs)
                try:
                    if shared:
                        timer.relabel(inside)
                    else:
                        timer.mark(inside)
                except Exception:
                    self.failed(hook)
                result = original(*args, **kwargs)
                try:
                    timer.mark(kinds.VERIFY_OVERHEAD)
                except Exception:
                    self.failed(hook)
                return result

            return span

        return wrap

    def _span(self, hook: str, enter: Callable[..., None], leave: Callable[[], None]) -> Callable[[Function], Function]:
        """Return a wrapper that calls `enter` with the function's arguments before it and `leave` after it."""

        def wrap(original: Function) -> Function:
            def span(*args: Any, **kwargs: Any) -> Any:
                timer = self.timer
                if timer is None or timer.current is None:
                    return original(*args, **kwargs)
                try:
                    enter(*args, **kwargs)
                except Exception:
                    self.failed(hook)
                result = original(*args, **kwargs)
                try:
                    leave()
                except Exception:
                    self.failed(hook)
                return result

            return span

        return wrap

    def _wrap_kv_prepare(self, original: Function) -> Function:
        return self._span("kv_prepare", self.enter_kv_prepare, self.leave_kv_prepare)(original)

    def enter_kv_prepare(self, *_args: Any, **_kwargs: Any) -> None:
        """Draft slots are addressed first in a cycle: nothing was enqueued since its start, so they share the mark."""
        timer = self.timer
        current = timer.current if timer is not None else None
        if timer is None or current is None:
            return
        if len(current.kinds) == 1 and not current.prefill:
            timer.relabel(kinds.KV_CACHE)
        else:
            timer.mark(kinds.KV_CACHE)

    def leave_kv_prepare(self) -> None:
        """What follows is nobody's until the draft begins."""
        timer = self.timer
        if timer is not None:
            timer.mark(kinds.OTHER)

    def _wrap_draft(self, original: Function) -> Function:
        span = self._span("draft", self.enter_draft, self.leave_draft)(original)

        def draft_forward(*args: Any, **kwargs: Any) -> Any:
            events = self.graph_events
            if events is None or self._open:
                return span(*args, **kwargs)
            # Outside a cycle this is a warm-up or the capture of the draft graph.
            try:
                self.begin_capture(events, *args, **kwargs)
            except Exception:
                self._give_up_graph_events()
            try:
                result = original(*args, **kwargs)
            except BaseException:
                with contextlib.suppress(Exception):
                    events.abandon_capture()
                raise
            try:
                events.end_capture()
            except Exception:
                self._give_up_graph_events()
            return result

        return draft_forward

    def begin_capture(self, events: DraftGraphEvents, worker: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
        """Let events into the draft graph if it is being captured."""
        events.begin_capture(int(worker.speculative_num_steps), int(forward_batch.batch_size))

    def _give_up_graph_events(self) -> None:
        if self.graph_events is not None:
            self.graph_events.give_up()
        self.graph_events = None
        self.failed("draft_graph")

    def enter_draft(self, worker: Any, *_args: Any, **_kwargs: Any) -> None:
        """Draft steps run one by one (no CUDA graph): each forward ends a step."""
        self._draft_step = 0
        self._draft_steps_left = max(int(getattr(worker, "speculative_num_steps", 1)) - 1, 0)
        timer = self.timer
        if timer is not None:
            timer.mark(kinds.FIRST_DRAFT_STEP if self._draft_steps_left else kinds.DRAFT_STEPS)

    def leave_draft(self) -> None:
        """The tree is built next, without anything between."""
        self._draft_steps_left = 0
        timer = self.timer
        if timer is None:
            return
        timer.mark(kinds.VERIFY_OVERHEAD)
        current = timer.current
        if current is not None:
            current.draft_end = len(current.kinds) - 1

    def _wrap_draft_whole(self, original: Function) -> Function:
        """Draft steps that cannot be told apart, or that run no forward (the multi-layer workers)."""
        return self._span("draft", self.enter_draft_whole, self.leave_draft)(original)

    def enter_draft_whole(self, *_args: Any, **_kwargs: Any) -> None:
        """All of the draft is one interval."""
        timer = self.timer
        if timer is not None:
            timer.mark(kinds.DRAFT_STEPS)

    def _wrap_draft_step(self, original: Function) -> Function:
        def forward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._draft_steps_left:
                try:
                    self.end_draft_step()
                except Exception:
                    self.failed("draft_step")
            elif self.graph_events is not None and self.graph_events.capturing is not None:
                try:
                    self.graph_events.end_step()
                except Exception:
                    self._give_up_graph_events()
            return result

        return forward

    def end_draft_step(self) -> None:
        """One draft forward is done; after the last one only the result is organised."""
        self._draft_steps_left -= 1
        self._draft_step += 1
        timer = self.timer
        if timer is not None:
            timer.mark(kinds.FIRST_DRAFT_STEP + self._draft_step if self._draft_steps_left else kinds.DRAFT_STEPS)

    def _wrap_draft_graph(self, original: Function) -> Function:
        """V2: the draft graph is launched right after its batch was prepared."""
        return self._draft_graph(original, self.enter_draft_graph)

    def _wrap_draft_graph_v1(self, original: Function) -> Function:
        """V1 makes the draft's batch between addressing its slots and launching its graph."""
        return self._draft_graph(original, self.enter_draft_whole)

    def _wrap_draft_graph_whole(self, original: Function) -> Function:
        """A draft graph whose steps are not told apart."""
        return self._span("draft_graph", self.enter_draft_whole, self.leave_draft)(original)

    def _draft_graph(self, original: Function, enter: Callable[..., None]) -> Function:
        span = self._span("draft_graph", enter, self.leave_draft)(original)

        def execute(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.graph_events is None or self.timer is None:
                return span(runner, *args, **kwargs)
            # Each launch times the events of the graph anew, also in a cycle that is not timed.
            try:
                if self.graph_events.unread is not None:
                    self.collect_draft_steps(final=True)
            except Exception:
                self.failed("draft_graph")
            result = span(runner, *args, **kwargs)
            try:
                if self.timer.current is not None:
                    self.note_replay(runner)
            except Exception:
                self.failed("draft_graph")
            return result

        return execute

    def collect_draft_steps(self, *, final: bool) -> None:
        """Read the step times of the last replay of a draft graph, if they can be had."""
        if self.graph_events is not None and self.timer is not None:
            self.graph_events.collect(self.timer, final=final)

    def note_replay(self, runner: Any) -> None:
        """Remember which graph was replayed for the current cycle (``runner.bs``: the padded batch size)."""
        if self.graph_events is not None and self.timer is not None and self.timer.current is not None:
            self.graph_events.replayed(self.timer.current, int(runner.speculative_num_steps), int(runner.bs))

    def enter_draft_graph(self, *_args: Any, **_kwargs: Any) -> None:
        """All draft steps are one graph replay, launched right after the slots are addressed: they share the mark."""
        timer = self.timer
        current = timer.current if timer is not None else None
        if timer is None or current is None:
            return
        if current.kinds[-1] == kinds.OTHER and len(current.kinds) == 2:
            timer.relabel(kinds.DRAFT_STEPS)
        else:
            timer.mark(kinds.DRAFT_STEPS)

    def _wrap_tree_build(self, original: Function) -> Function:
        """The tree is built right after the draft."""
        return self._part_span("tree_build", kinds.TREE_BUILD, shared=True)(original)

    def _wrap_prepare(self, original: Function) -> Function:
        """The verify input and the graph's inputs are prepared."""
        return self._part_span("prepare", kinds.PREPARE)(original)

    def _wrap_sample(self, original: Function) -> Function:
        """Tokens are sampled from the target's logits and compared with the draft."""
        return self._part_span("sample", kinds.SAMPLE_ACCEPT)(original)

    def _wrap_target_verify(self, original: Function) -> Function:
        def forward_batch_generation(*args: Any, **kwargs: Any) -> Any:
            timer = self.timer
            if timer is None or timer.current is None:
                return original(*args, **kwargs)
            # The same method serves prefill, which is no verify.
            verify = kwargs.get("is_verify")
            try:
                if verify:
                    timer.launch_verify()
                else:
                    timer.launch_target()
            except Exception:
                self.failed("target_verify")
            result = original(*args, **kwargs)
            if verify:
                try:
                    timer.mark(kinds.VERIFY_OVERHEAD)
                except Exception:
                    self.failed("target_verify")
            return result

        return forward_batch_generation

    def _wrap_kv_compact(self, original: Function) -> Function:
        """For trees the accepted path is moved to the front of its slots."""
        return self._plain_span("kv_compact", kinds.KV_CACHE, kinds.VERIFY_OVERHEAD)(original)

    def _wrap_kv_verify(self, original: Function) -> Function:
        """V1 allocates the slots of the tokens to verify in every cycle."""
        return self._plain_span("kv_prepare", kinds.KV_CACHE, kinds.VERIFY_OVERHEAD)(original)

    def _wrap_kv_free(self, original: Function) -> Function:
        """V1 frees, and for trees on pages moves, slots in the middle of accepting.

        Also called while slots are addressed and outside cycles, where it belongs to what goes on around it.
        """

        def span(*args: Any, **kwargs: Any) -> Any:
            timer = self.timer
            if timer is None or timer.current is None:
                return original(*args, **kwargs)
            around = timer.current.kinds[-1]
            inside = around in (kinds.VERIFY_OVERHEAD, kinds.SAMPLE_ACCEPT)
            if inside:
                try:
                    timer.mark(kinds.KV_CACHE)
                except Exception:
                    self.failed("kv_compact")
            result = original(*args, **kwargs)
            if inside:
                try:
                    timer.mark(around)
                except Exception:
                    self.failed("kv_compact")
            return result

        return span

    def _wrap_draft_extend(self, original: Function) -> Function:
        """The draft model reads the accepted tokens (or, after a prefill, the prompt).

        Nothing follows in the cycle: the cycle's last mark ends this phase. Only the last stage of a pipeline drafts
        for the next cycle in the rest of this one.
        """

        def draft_extend(*args: Any, **kwargs: Any) -> Any:
            timer = self.timer
            if timer is None or timer.current is None:
                return original(*args, **kwargs)
            try:
                timer.mark(kinds.DRAFT_EXTEND)
            except Exception:
                self.failed("draft_extend")
            result = original(*args, **kwargs)
            if self.tail_draft:
                try:
                    timer.mark(kinds.OTHER)
                except Exception:
                    self.failed("draft_extend")
            return result

        return draft_extend

    def _wrap_kv_allocation(self, original: Function) -> Function:
        def alloc_for_spec_decode(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter_ns()
            result = original(*args, **kwargs)
            try:
                self.note_kv_allocation(perf_counter_ns() - begin)
            except Exception:
                self.failed("kv_allocation")
            return result

        return alloc_for_spec_decode

    def note_kv_allocation(self, nanoseconds: int) -> None:
        """Count host time of an allocation beside the cycle; `flush` records it."""
        # Divided by all cycles, so it counts whenever cycles do, timed or not.
        if self.recorder is not None and self.budget.counting:
            self._allocation_ns += nanoseconds

    # --- the result --------------------------------------------------------------------------------------
    def _wrap_accept(self, original: Function) -> Function:
        def process_batch_result(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self.recorder is None or not self.budget.counting:
                return original(scheduler, *args, **kwargs)
            rows = None
            begin = perf_counter_ns()
            try:
                if len(args) > 1:
                    batch, result = args[0], args[1]
                else:
                    batch, result = args[0] if args else kwargs["batch"], kwargs["result"]
                rows = self.before_result(batch, result)
            except Exception:
                self.failed("accept")
            spent = perf_counter_ns() - begin
            returned = original(scheduler, *args, **kwargs)
            if rows is not None:
                try:
                    self.after_result(rows, result, spent)
                except Exception:
                    self.failed("accept", rows.record)
            return returned

        return process_batch_result

    def _take_launched(self, requests: Sequence[Any], record: CycleRecord | None) -> CycleRecord | None:
        """Return the cycle of a result that was made anew: the oldest launched with these very requests.

        In a pipeline the last stage sends its result around all stages, itself included, which make another object of
        it, and process it with a copy of the batch (``_pp_prep_batch_result`` in ``managers/scheduler_pp_mixin.py``,
        0.5.21 to 0.5.23). Results come in the order of launches.
        """
        for i, (launched, rows) in enumerate(self._launched):
            if launched is record or (
                record is None
                and len(rows) == len(requests)
                and all(row is request for row, request in zip(rows, requests, strict=True))
            ):
                for _ in range(i + 1):
                    self._launched.popleft()
                return launched
        return record

    def before_result(self, batch: Any, result: Any) -> RowsBefore:
        """Find the cycle that a result is of, leave nothing of ours on it, and look at the rows before SGLang does."""
        record: CycleRecord | None = getattr(result, RECORD, None)
        if record is not None:
            delattr(result, RECORD)
        if self.tail_draft:
            record = self._take_launched(batch.reqs, record)
        if record is not None and record.before is not None:
            # The worker has updated them already; these were looked at before it.
            rows: RowsBefore = record.before
        else:
            rows = RowsBefore(batch.reqs)
        rows.record = record
        return rows

    def after_result(self, rows: RowsBefore, result: Any, spent_ns: int) -> None:
        """Note what the result brought; what can wait is done by `flush`, for several results together.

        Raises:
            ValueError: It does not say how many drafts were accepted.
        """
        begin = perf_counter_ns()
        appended, ended = rows.after()
        self._appended += appended
        record = rows.record
        try:
            if record is not None:
                drafts: Sequence[int] | None = ()
                if rows.contexts and not record.prefill and not self.plain_decode:
                    drafts = correct_drafts(result) if record.before is None else rows.drafts_of_requests()
                    if drafts is None and not record.beside_prefill:
                        raise ValueError("a decode cycle brought no accept lengths")
                self._results.append((record, rows, drafts))
                self._waiting_rows += len(rows.live)
        finally:
            if record is not None and record.before is not None:
                rows.forget_counters()
            self._spent_ns += perf_counter_ns() - begin + spent_ns
            # After the last answer of an offline script nothing more may run here: its Engine kills the scheduler.
            if (
                ended
                or begin > self._flush_at_ns
                or len(self._results) >= self._flush_results
                or self._waiting_rows >= FLUSH_ROWS
            ):
                self.flush()

    def _acceptance(self, record: CycleRecord, rows: RowsBefore, drafts: Sequence[int] | None) -> Acceptance:
        """Return what a result says of its cycle.

        Raises:
            ValueError: It cannot be.
        """
        if record.prefill:
            return Acceptance(excluded="health_check" if rows.health_checks and not rows.contexts else None)
        if self.plain_decode:
            return rows.acceptance([0] * len(rows.live))
        return _NO_DRAFTS if drafts is None else rows.acceptance(drafts)

    def flush(self) -> None:
        """Record every result that has arrived, and publish.

        Done for several cycles at once: in a loop it costs a third of what it costs once per cycle.
        """
        begin = perf_counter_ns()
        timer, recorder = self.timer, self.recorder
        assert timer is not None
        assert recorder is not None
        launch_ns = timer.timed_ns + timer.prefill_ns
        if self._appended:
            if self.recording:
                recorder.add_output_tokens(self._appended)
            self._appended = 0
        if self._allocation_ns:
            recorder.add_kv_allocation(self._allocation_ns * 1e-9)
            self._allocation_ns = 0
        try:
            self.collect_draft_steps(final=False)
        except Exception:  # the counts wait behind it
            self.failed("draft_graph")
        results, self._results, self._waiting_rows = self._results, [], 0
        for record, rows, drafts in results:
            try:
                timer.take(record, self._acceptance(record, rows, drafts))
            except Exception:  # one that fails costs the others nothing
                self.failed("accept", record)
        try:
            timer.drain()
        except Exception:
            self.failed("accept")
        now = perf_counter_ns()
        self._flush_at_ns = now + FLUSH_NS
        # Counting is not optional; what sampling and fuse can save is the timing.
        spent_ns = now - begin + launch_ns + timer.host_ns + self._spent_ns
        timed_ns, prefill_ns = timer.timed_ns, timer.prefill_ns
        self._spent_ns = timer.host_ns = timer.timed_ns = timer.prefill_ns = 0
        recorder.add_host_cost(spent_ns * 1e-9)
        counting_ns = spent_ns - timed_ns - prefill_ns
        self.budget.spent(timed_ns * 1e-9, counting_ns * 1e-9, len(results), prefills=prefill_ns * 1e-9)
        recorder.commit()
        if self.captures is not None:
            self.captures.poll(traffic=bool(results))

    # --- the scheduler's loop ----------------------------------------------------------------------------
    def _wrap_scheduler(self, original: Function) -> Function:
        def get_next_batch_to_run(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            plan = original(scheduler, *args, **kwargs)
            if self.recorder is not None:
                try:
                    # The gauge is published with the results of several cycles, so it is not looked at before each.
                    self._plans_to_look -= 1
                    if self._plans_to_look <= 0 or getattr(plan, "batch_to_run", plan) is None:
                        self.note_plan(scheduler, plan)
                except Exception:
                    self.failed("scheduler")
            return plan

        return get_next_batch_to_run

    def note_plan(self, scheduler: Any, plan: Any) -> None:
        """See what the scheduler runs next; None means an empty iteration."""
        batch = getattr(plan, "batch_to_run", plan)
        self._plans_to_look = 0 if batch is None else LOOK_EVERY
        timer, recorder = self.timer, self.recorder
        assert timer is not None
        assert recorder is not None
        running = getattr(plan, "running_batch", None)
        if running is None:
            running = scheduler.running_batch
        changed = recorder.set_running_requests(len(running.reqs)) if self.budget.counting else False
        if batch is not None:
            return
        timer.interrupt()
        now = time.monotonic()
        if now - self._idle_poll > _IDLE_POLL_SECONDS:
            self._idle_poll = now
            self._poll_control()
            if self.captures is not None and self.captures.current is not None:
                self.captures.current.idle()
            changed = True
        if changed or self._results or self._appended or timer.waiting:
            self.flush()


def _batch_of(kwargs: dict[str, Any]) -> Any:
    """Return the batch that was given by name; ``model_worker_batch`` is its name in V2 until 0.5.12."""
    return kwargs["batch"] if "batch" in kwargs else kwargs["model_worker_batch"]
