"""What a batch's result says: accepted draft tokens, live rows, tokens appended.

One definition for all versions. A draft is one live request in one cycle; a row whose request had already finished
or was retracted when the result arrived is not a draft (under the overlap scheduler a finished request has one row
more). Accepted tokens exclude the bonus token and are taken before stop conditions.

Where they come from. V2 copies accept lengths to the host for itself and leaves them on the result, under a name that
changed twice (`correct_drafts`). V1 updates the requests inside ``EagleVerifyInput.verify``, and cuts what it puts on
the result at a stop token; but it counts each request's accepted tokens before the cut in the request itself
(``srt/speculative/eagle_info.py``, 0.5.6 to 0.5.12), so the difference over the cycle is taken (`drafts_of_requests`).
Nothing is copied from the GPU for us in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from eagle_exporter.timing.cycle import Acceptance, CycleRecord

HEALTH_CHECK_PREFIX = "HEALTH_CHECK"
"""Request ids of SGLang's own health checks begin with it (``HEALTH_CHECK_RID_PREFIX`` in managers/utils.py)."""

_CORRECT_DRAFTS = (
    "num_correct_drafts_per_req_cpu",  # 0.5.12 and newer; from 0.5.20 on without all of num_non_draft_tokens_per_req
    "num_accepted_drafts_per_req_cpu",  # 0.5.11
    "accept_length_per_req_cpu",  # 0.5.7 to 0.5.10
)
_COUNTERS = (
    "spec_num_correct_drafts",  # 0.5.12 and newer
    "spec_accepted_drafts",  # 0.5.11
    "spec_accepted_tokens",  # 0.5.6 to 0.5.10
)
"""``Req``'s count of its accepted draft tokens so far, without bonus tokens."""


class RowsBefore:
    """The requests of a batch, looked at before SGLang updates them.

    Attributes:
        live: Per row: the request still runs and is no health check.
        contexts: Per live row: prompt and output tokens so far.
        health_checks: Rows that are health checks.
        record: The cycle that the batch was launched as, None when it was not measured.
    """

    __slots__ = ("_all", "_running", "contexts", "health_checks", "live", "record")

    def __init__(self, requests: Sequence[Any], *, counters: bool = False) -> None:
        """Look at `requests` (SGLang ``Req`` objects); keep no reference beyond the result's processing.

        Args:
            requests: In row order.
            counters: Look at the requests' own counts too, for `updated` and `drafts_of_requests`.
        """
        live: list[bool] = []
        running: list[tuple[Any, int]] = []
        contexts: list[int] = []
        health_checks = 0
        # All in one pass: it runs in every cycle, and by then the requests have left the processor's caches.
        for request in requests:
            if request.finished_reason is not None or request.is_retracted:
                live.append(False)
            elif str(request.rid).startswith(HEALTH_CHECK_PREFIX):
                live.append(False)
                health_checks += 1
            else:
                length = len(request.output_ids)
                live.append(True)
                running.append((request, length))
                contexts.append(len(request.origin_input_ids) + length)
        self.live = live
        self.contexts = contexts
        self.health_checks = health_checks
        self.record: CycleRecord | None = None
        self._running: Sequence[tuple[Any, int]] = running
        """Per live row: the request, and its output tokens so far."""
        self._all: Sequence[tuple[Any, int, tuple[int, int] | None]] = (
            [(request, len(request.output_ids), _counts(request)) for request in requests] if counters else ()
        )
        """Per row: the request, its output tokens, its own counts."""

    def forget_counters(self) -> None:
        """Let go of the rest of SGLang's objects."""
        self._all = ()

    def after(self) -> tuple[int, bool]:
        """Return what SGLang has done with the live rows since, once: they are let go.

        Returns:
            Output tokens appended, after stop conditions (``finished_len`` is where SGLang cuts the output of a
            finished request, ``output_ids_through_stop``); and whether every live request has ended, False when there
            was none.
        """
        total = 0
        running = ended = False
        rows, self._running = self._running, ()
        for request, before in rows:
            appended = len(request.output_ids)
            if request.finished_reason is None:
                running = True
            else:
                ended = True
            cut = request.finished_len
            if cut is not None and cut < appended:
                appended = cut
            if appended > before:
                total += appended - before
        return total, ended and not running

    def updated(self) -> bool:
        """Return whether SGLang has appended to any request since: V1 does so inside the worker. Needs `counters`."""
        return any(len(request.output_ids) > before for request, before, _ in self._all)

    def drafts_of_requests(self) -> list[int] | None:
        """Return accepted draft tokens per row by the requests' own counts; None when nothing was verified since.

        Needs `counters`.

        Raises:
            ValueError: The requests do not say, or a live one was not verified exactly once.
        """
        drafts, checks = [], []
        for request, _, before in self._all:
            now = _counts(request)
            if before is None or now is None:
                raise ValueError(f"a request has none of {', '.join(_COUNTERS)}")
            checks.append(now[0] - before[0])
            drafts.append(now[1] - before[1])
        if not any(checks):
            return None
        for check, alive in zip(checks, self.live, strict=True):
            if alive and check != 1:
                raise ValueError(f"a request was verified {check} times in one cycle")
        return drafts

    def acceptance(self, drafts: Sequence[int]) -> Acceptance:
        """Return what was accepted.

        Args:
            drafts: Accepted draft tokens per row, without the bonus token; not looked at when no row is live.

        Raises:
            ValueError: There is not one number per row, or a negative one.
        """
        live = self.live
        wasted = len(live) - len(self.contexts) - self.health_checks
        if not self.contexts:
            excluded = "health_check" if self.health_checks else "no_live_row"
            return Acceptance(wasted_rows=wasted, excluded=excluded)
        if len(drafts) != len(live):
            raise ValueError(f"{len(drafts)} accept lengths for {len(live)} rows")
        accepted = list(drafts if len(self.contexts) == len(live) else compress(drafts, live))
        if min(accepted) < 0:
            raise ValueError(f"a negative number of accepted tokens: {min(accepted)}")
        return Acceptance(correct_drafts=accepted, context_tokens=self.contexts, wasted_rows=wasted)


def correct_drafts(result: Any) -> Sequence[int] | None:
    """Return accepted draft tokens per row, without the bonus token; None when the result is of no verify.

    Args:
        result: SGLang's ``GenerationBatchResult`` after its processing, when the accept lengths are on the host.

    Raises:
        ValueError: The accept lengths are still on the device, where reading them would wait for it.
    """
    for name in _CORRECT_DRAFTS:
        value = getattr(result, name, None)
        if value is not None:
            return value  # type: ignore[no-any-return]
    lengths = getattr(result, "accept_lens", None)
    if lengths is None:
        return None
    # 0.5.6 leaves the lengths themselves only, the bonus token included.
    if not lengths.is_cpu:
        raise ValueError("the accept lengths are not on the host")
    return [length - 1 for length in lengths.tolist()]


def _counts(request: Any) -> tuple[int, int] | None:
    """Return how often a request was verified and how many of its drafts were accepted, None when it does not say."""
    for name in _COUNTERS:
        tokens = getattr(request, name, None)
        if tokens is not None:
            return request.spec_verify_ct, tokens
    return None
