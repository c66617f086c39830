"""Time of each draft step inside a CUDA graph.

With CUDA graphs all draft steps are one replay, and no event recorded outside can part them. Events made with
``external=True`` and recorded while the graph is captured become nodes of the graph: each replay times them anew.
They therefore belong to their graph and hold one cycle only, so they are read when the draft of that cycle is known
to be complete and before the graph is launched again; otherwise the reading is dropped and counted.

Inside the graph they hang on a branch of their own, beside the chain of kernels: a kernel need not wait for an event.
In the chain itself each event between two kernels costs the GPU 5 µs in every replay, on a branch under 1 (seen on an
H200, see tests/gpu/events.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from eagle_exporter.timing.cuda_driver import handle_of

if TYPE_CHECKING:
    from eagle_exporter.timing.cuda_driver import CudaDriver
    from eagle_exporter.timing.cycle import CycleRecord, CycleTimer

logger = logging.getLogger("eagle_exporter")

MILLISECOND = 1e-3
READ_EVERY = 4
"""Every how many timed replays the steps are read; ``eagle_draft_steps_total`` counts those that were."""


_kept: list[Any] = []
"""Events inside captured graphs, for as long as the process lives: a graph that is launched after one of its events
was destroyed writes where it must not. Nobody tells when SGLang gives a graph up."""


class DraftGraphEvents:
    """Events inside the captured draft graphs of one worker.

    Attributes:
        graphs: ``(num_steps, captured batch size)`` -> events: the start of the draft, then the end of each forward.
            With a driver they are its handles.
        capturing: Events of the draft graph that is being captured now, None when none is.
        unread: The cycle and the events of a replay whose steps have not been read yet.
    """

    def __init__(self, cuda: Any, driver: CudaDriver | None = None) -> None:
        """Record with ``torch.cuda`` (or a stand-in); read with `driver`, or with torch where there is none."""
        self._cuda = cuda
        self._driver = driver
        self.graphs: dict[tuple[int, int], list[Any]] = {}
        self.capturing: list[Any] | None = None
        self.unread: tuple[CycleRecord, list[Any]] | None = None
        self._key = (0, 0)
        self._branch: Any = None
        self._joined = True
        self._replays = 0

    @property
    def needs_driver(self) -> bool:
        """Whether the events can be read by the driver only."""
        return self._driver is not None

    # --- at capture --------------------------------------------------------------------------------------
    def begin_capture(self, num_steps: int, batch_size: int) -> None:
        """``draft_forward`` begins; records nothing unless the stream is being captured."""
        self.capturing = None
        if num_steps <= 1:
            return
        if self._cuda.is_current_stream_capturing():
            self._key = (num_steps, batch_size)
            self.graphs.pop(self._key, None)
            self.capturing = []
            self._record()
        elif self._branch is None:
            # A run before the capture: while one goes on no stream should be made, and before SGLang has chosen the
            # device of this process none must be.
            self._branch = self._cuda.Stream()

    def end_step(self) -> None:
        """One draft forward was captured."""
        if self.capturing is not None:
            self._record()

    def end_capture(self) -> None:
        """``draft_forward`` ends. The branch is joined in any case: a capture with a loose end fails."""
        if not self._joined:
            self._joined = True
            self._cuda.current_stream().wait_stream(self._branch)
        events, self.capturing = self.capturing, None
        if events:
            self.graphs[self._key] = events if self._driver is None else [handle_of(event) for event in events]

    def abandon_capture(self) -> None:
        """``draft_forward`` raised: no graph comes of it, and no later forward is one of its steps."""
        self.capturing = None
        self.end_capture()

    def give_up(self) -> None:
        """Something failed: there will be no events, but the branch is joined by `end_capture`."""
        self.capturing = None
        self.graphs.clear()
        self.unread = None

    def _record(self) -> None:
        assert self.capturing is not None
        # Made with external=True, or the event would only be a dependency inside the graph and could not be read.
        event = self._cuda.Event(enable_timing=True, external=True)
        _kept.append(event)
        if self._branch is None:
            event.record()
        else:
            self._joined = False
            self._branch.wait_stream(self._cuda.current_stream())
            event.record(self._branch)
        self.capturing.append(event)

    # --- at replay ---------------------------------------------------------------------------------------
    def replayed(self, record: CycleRecord, num_steps: int, batch_size: int) -> None:
        """The graph for these steps and (padded) batch size was launched for `record`."""
        self._replays += 1
        events = self.graphs.get((num_steps, batch_size)) if self._replays % READ_EVERY == 0 else None
        if events:
            self.unread = (record, events)

    def collect(self, timer: CycleTimer, *, final: bool) -> None:
        """Read the steps of the last replay if its draft is complete.

        Args:
            timer: Knows whether the draft's end mark has happened.
            final: The graph is about to be launched again: what is not complete now is lost.
        """
        unread, self.unread = self.unread, None  # at once: what raises here is not tried again
        if unread is None:
            return
        record, events = unread
        slot = record.slot
        if slot is not None and record.draft_end and timer.clock.reached(slot, record.draft_end):
            record.step_seconds = self._elapsed(events)
        elif final or slot is None:
            timer.recorder.drop("draft_step")
        else:
            self.unread = unread

    def _elapsed(self, events: Sequence[Any]) -> list[float]:
        if self._driver is not None:
            return [self._driver.between(earlier, later) * MILLISECOND for earlier, later in pairwise(events)]
        return [earlier.elapsed_time(later) * MILLISECOND for earlier, later in pairwise(events)]
