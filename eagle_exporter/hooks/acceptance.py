"""What a batch's result says: accepted draft tokens, live rows, tokens appended.

One definition for all versions. A draft is one live request in one cycle; a row whose request had already finished
or was retracted when the result arrived is not a draft (under the overlap scheduler a finished request has one row
more). Accepted tokens exclude the bonus token and are taken before stop conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_exporter.timing.cycle import Acceptance

HEALTH_CHECK_PREFIX = "HEALTH_CHECK"
"""Request ids of SGLang's own health checks begin with it (``HEALTH_CHECK_RID_PREFIX`` in managers/utils.py)."""

_CORRECT_DRAFTS = (
    "num_correct_drafts_per_req_cpu",  # 0.5.12 and newer
    "num_accepted_drafts_per_req_cpu",  # 0.5.11
    "accept_length_per_req_cpu",  # 0.5.7 to 0.5.10
)


class RowsBefore:
    """The requests of a batch, looked at before SGLang processes the result.

    Attributes:
        requests: The batch's requests in row order.
        live: Per row: the request still runs and is no health check.
        lengths: Per row: output tokens so far.
        health_checks: Rows that are health checks.
    """

    __slots__ = ("health_checks", "lengths", "live", "requests")

    def __init__(self, requests: Sequence[Any]) -> None:
        """Look at `requests` (SGLang ``Req`` objects); keep no reference beyond the result's processing."""
        self.requests = requests
        self.live = [request.finished_reason is None and not request.is_retracted for request in requests]
        self.lengths = [len(request.output_ids) for request in requests]
        self.health_checks = 0
        for row, request in enumerate(requests):
            if self.live[row] and str(request.rid).startswith(HEALTH_CHECK_PREFIX):
                self.live[row] = False
                self.health_checks += 1

    def appended_tokens(self) -> int:
        """Return the output tokens that SGLang has appended since, after stop conditions.

        ``finished_len`` is where SGLang cuts the output of a finished request (``output_ids_through_stop``).
        """
        total = 0
        for request, alive, before in zip(self.requests, self.live, self.lengths, strict=True):
            if alive:
                after = len(request.output_ids)
                cut = request.finished_len
                if cut is not None and cut < after:
                    after = cut
                if after > before:
                    total += after - before
        return total

    def all_ended(self) -> bool:
        """Return whether SGLang has ended every request of the batch that was live before."""
        return any(self.live) and not any(
            alive and request.finished_reason is None for request, alive in zip(self.requests, self.live, strict=True)
        )

    def acceptance(self, result: Any, *, drafted: bool = True) -> Acceptance:
        """Return what was accepted, after SGLang has put the accept lengths of `result` on the host.

        Args:
            result: SGLang's ``GenerationBatchResult``.
            drafted: False for plain decode: each live row is one token and nothing was drafted.

        Raises:
            ValueError: The result has no accept lengths, or not one per row.
        """
        live = self.live
        wasted = len(live) - sum(live) - self.health_checks
        if not any(live):
            excluded = "health_check" if self.health_checks else "no_live_row"
            return Acceptance(wasted_rows=wasted, excluded=excluded)
        correct = correct_drafts(result) if drafted else [0] * len(live)
        if len(correct) != len(live):
            raise ValueError(f"{len(correct)} accept lengths for {len(live)} rows")
        accepted = [count for count, alive in zip(correct, live, strict=True) if alive]
        if min(accepted) < 0:
            raise ValueError(f"a negative number of accepted tokens: {min(accepted)}")
        return Acceptance(
            correct_drafts=accepted,
            context_tokens=[
                len(request.origin_input_ids) + before
                for request, alive, before in zip(self.requests, live, self.lengths, strict=True)
                if alive
            ],
            wasted_rows=wasted,
        )


def correct_drafts(result: Any) -> Sequence[int]:
    """Return accepted draft tokens per row, without the bonus token.

    Raises:
        ValueError: The result carries none of the fields that hold them.
    """
    for name in _CORRECT_DRAFTS:
        value = getattr(result, name, None)
        if value is not None:
            return value  # type: ignore[no-any-return]
    raise ValueError(f"the result has none of {', '.join(_CORRECT_DRAFTS)}")
