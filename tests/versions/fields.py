"""Fields and attributes of SGLang's objects that the hooks read, as far as the text of a wheel shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_exporter.hooks import acceptance, points
from eagle_exporter.hooks.points import Family
from eagle_exporter.hooks.source import Source

_SPECULATIVE = "sglang.srt.speculative"
_MANAGERS = "sglang.srt.managers"
_SCHEDULER = f"{_MANAGERS}.scheduler:Scheduler"
_REQUEST = f"{_MANAGERS}.schedule_batch:Req"
_BATCH = f"{_MANAGERS}.schedule_batch:ScheduleBatch"
_WORKER_BATCH = f"{_MANAGERS}.schedule_batch:ModelWorkerBatch"
_RESULT = f"{_MANAGERS}.utils:GenerationBatchResult"
_VERIFY_INPUT = f"{_SPECULATIVE}.eagle_info:EagleVerifyInput"
_PARALLEL_STATE = "sglang.srt.distributed.parallel_state_wrapper:ParallelState"


@dataclass(frozen=True)
class Read:
    """Something that the hooks read.

    Attributes:
        places: ``module:Class.attribute``; the hooks take the first that is there, so one has to be.
        families: Names of the families whose hooks read it; empty for all.
    """

    places: tuple[str, ...]
    families: tuple[str, ...] = ()


def _each(owner: str, *names: str, families: tuple[str, ...] = ()) -> tuple[Read, ...]:
    return tuple(Read((f"{owner}.{name}",), families) for name in names)


V1 = ("v1", "multi-layer-v1", "frozen-kv-mtp-v1")
OLD_NAMES = ("v2-0.5.6", "multi-layer-v2-0.5.7")
"""V2 families of 0.5.11 and older too, where the accept lengths have other names."""
DRAFTING = tuple(family.name for family in points.FAMILIES)

READS = (
    # acceptance.RowsBefore
    *_each(_REQUEST, "finished_reason", "is_retracted", "output_ids", "rid", "finished_len", "origin_input_ids"),
    # acceptance.drafts_of_requests
    *_each(_REQUEST, "spec_verify_ct", families=V1),
    Read(tuple(f"{_REQUEST}.{name}" for name in acceptance._COUNTERS), V1),
    # acceptance.correct_drafts; 0.5.6 has no number for each request, only the lengths
    *_each(_RESULT, "accept_lens"),
    Read((f"{_RESULT}.{acceptance._CORRECT_DRAFTS[0]}",), tuple(set(DRAFTING) - {*V1, *OLD_NAMES})),
    Read(tuple(f"{_RESULT}.{name}" for name in (*acceptance._CORRECT_DRAFTS, "accept_lens")), OLD_NAMES),
    # session: the scheduler's loop, its batches and what is verified
    *_each(_SCHEDULER, "running_batch"),
    *_each(_BATCH, "reqs", "forward_mode", "spec_info", "is_extend_in_batch"),
    *_each(_WORKER_BATCH, "reqs", "forward_mode", "spec_info", "is_extend_in_batch", families=("v2-0.5.6",)),
    *_each(_VERIFY_INPUT, "spec_steps", "draft_token_num", families=DRAFTING),
    # identity
    *_each(
        _SCHEDULER, "server_args", "draft_worker", "tp_worker", "max_total_num_tokens", "enable_overlap", "page_size"
    ),
)

ROLE_READS = {
    "cycle": ("speculative_num_steps", "speculative_num_draft_tokens", "topk"),
    "draft": ("speculative_num_steps",),
    "draft_graph": ("bs", "speculative_num_steps"),
    "draft_graph_v1": ("bs", "speculative_num_steps"),
    "draft_graph_whole": ("bs", "speculative_num_steps"),
}
"""What a wrapper reads off the object whose method it wraps."""

RANKS = ("tp_rank", "pp_rank", "dp_rank", "attn_tp_rank")
"""On ``scheduler.ps`` in 0.5.13 to 0.5.20, on the scheduler before, and in the runtime context afterwards."""


def reads_of(family: Family) -> tuple[Read, ...]:
    """Return what the hooks of a family read."""
    own = tuple(
        Read((f"{point.target.rpartition('.')[0]}.{name}",))
        for point in family.points
        for name in ROLE_READS.get(point.role, ())
    )
    return own + tuple(read for read in READS if not read.families or family.name in read.families)


def missing(source: Source, family: Family) -> tuple[str, ...]:
    """Return what the hooks of a family read and this SGLang is not seen to have."""

    def there(place: str) -> bool:
        owner, _, name = place.rpartition(".")
        return source.has_attribute(owner, name)

    gone = [" or ".join(read.places) for read in reads_of(family) if not any(map(there, read.places))]
    if there(f"{_SCHEDULER}.ps"):
        gone += [f"{_PARALLEL_STATE}.{name}" for name in RANKS if not there(f"{_PARALLEL_STATE}.{name}")]
    elif there(f"{_SCHEDULER}.{RANKS[0]}"):
        gone += [f"{_SCHEDULER}.{name}" for name in RANKS if not there(f"{_SCHEDULER}.{name}")]
    else:
        # Its names are given when it is published, and stand in its module as text.
        context = source.function("sglang.srt.runtime_context:get_parallel")
        text = (source.text(context.path) or b"").decode() if context is not None else ""
        gone += [f"runtime_context.get_parallel().{name}" for name in RANKS if not re.search(rf"\b{name}\b", text)]
    return tuple(gone)
