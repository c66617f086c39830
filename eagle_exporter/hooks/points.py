"""Where each hook attaches: one family of hook points per speculative worker and shape of its code.

Which family applies is decided by the worker class that SGLang chose (`for_worker`), and where one class changed its
shape over the versions by what resolves; the version string decides nothing. Sources: the ``sglang`` wheels of the
versions named with each family.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

_SPECULATIVE = "sglang.srt.speculative"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"

SCHEDULER_INIT = f"{_SCHEDULER}.__init__"
LAUNCH_SCHEDULERS = "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes"
"""0.5.10 to 0.5.23: a classmethod that gets the server's arguments before any child exists."""
LAUNCH_ANCHORS = (
    LAUNCH_SCHEDULERS,
    "sglang.srt.entrypoints.engine:_launch_scheduler_processes",  # 0.5.7 to 0.5.9
    "sglang.srt.entrypoints.engine:_launch_subprocesses",  # 0.5.6
)
"""Where the launch of the schedulers may be caught; the first that resolves. All take ``server_args``."""

CREATE_WORKER = (
    f"{_SPECULATIVE}.spec_info:SpeculativeAlgorithm.create_worker",
    f"{_SPECULATIVE}.spec_registry:CustomSpecAlgo.create_worker",
)
"""0.5.8 and newer: return the worker's class, before it is made. The second, for algorithms of other plugins, from
0.5.12 on."""
CREATE_DRAFT_WORKER = f"{_SPECULATIVE}.spec_info:SpeculativeAlgorithm.create_draft_worker"
"""0.5.6 and 0.5.7: returns the worker itself, whose graphs have been captured by then."""

STANDALONE_WORKERS = (
    f"{_SPECULATIVE}.standalone_worker:StandaloneWorker",
    f"{_SPECULATIVE}.standalone_worker_v2:StandaloneWorkerV2",
)
"""Subclasses of the EAGLE workers with constructors of their own."""

ANY_WORKER = "*:*"
"""Stands for the worker class in the points of `GENERIC`."""


@dataclass(frozen=True)
class HookPoint:
    """One function of SGLang that a hook wraps.

    Attributes:
        hook: Logical name, one of `catalogue.HOOKS`.
        target: ``module:path`` of the definition, see `attach.resolve`. What begins with the family's worker is looked
            up in the class that SGLang chose, which may be a subclass.
        role: Which wrapper of `session.Session` is used; several points can share a hook.
        reads: Parameter names that the wrapper looks at, checked by ``doctor`` and the compatibility test.
    """

    hook: str
    target: str
    role: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """The hook points of one speculative worker in a range of SGLang versions.

    Attributes:
        name: Value of the ``hook_family`` label.
        versions: For people.
        worker: ``module:Class`` of the speculative worker that it serves, subclasses included.
        points: What to wrap. A hook that has no point here has nothing to measure in this worker.
        knows: Hooks without a point whose answer is known all the same: nothing of the kind ever happens.
        marks: Functions beside the points that SGLang has from this shape on and not before. They tell the shape where
            a single point differs from an older one, which may be the one that a later SGLang renames.
    """

    name: str
    versions: str
    worker: str
    points: tuple[HookPoint, ...]
    knows: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def of_worker(self, point: HookPoint) -> bool:
        """Return whether a point is looked up in the class that SGLang chose."""
        return bool(self.worker) and point.target.startswith(f"{self.worker}.")

    @property
    def hooks(self) -> tuple[str, ...]:
        """The logical hooks of the points, each once."""
        return tuple(dict.fromkeys(point.hook for point in self.points))


# --- points that several families share ------------------------------------------------------------------
_SCHEDULER_POINTS = (
    HookPoint("scheduler", f"{_SCHEDULER}.get_next_batch_to_run", "scheduler"),
    HookPoint("accept", f"{_SCHEDULER}.process_batch_result", "accept", ("batch", "result")),
)
_TARGET_FORWARD = "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation"
_MODEL_FORWARD = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
_TARGET_VERIFY = HookPoint("target_verify", _TARGET_FORWARD, "target_verify", ("is_verify",))
_DRAFT_STEP = HookPoint("draft_step", _MODEL_FORWARD, "draft_step")
_EVERYWHERE = (*_SCHEDULER_POINTS, _TARGET_VERIFY)

_EAGLE_V2 = f"{_SPECULATIVE}.eagle_worker_v2:EAGLEWorkerV2"
_MULTI_V2 = f"{_SPECULATIVE}.multi_layer_eagle_worker_v2:MultiLayerEagleWorkerV2"
_FROZEN_V2 = f"{_SPECULATIVE}.frozen_kv_mtp_worker_v2:FrozenKVMTPWorkerV2"
_EAGLE_DRAFT = f"{_SPECULATIVE}.eagle_worker_v2:EagleDraftWorker"
_MULTI_DRAFT = f"{_SPECULATIVE}.multi_layer_eagle_worker_v2:MultiLayerEagleDraftWorker"
_FROZEN_DRAFT = f"{_SPECULATIVE}.frozen_kv_mtp_worker_v2:FrozenKVMTPDraftWorker"
_EAGLE_GRAPH = f"{_SPECULATIVE}.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner"
_FROZEN_GRAPH = f"{_SPECULATIVE}.frozen_kv_mtp_cuda_graph_runner:FrozenKVMTPCudaGraphRunner"


# What tells a shape from an older one that has the same points but one.
_RESULTS_13 = (
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor.process_batch_result_decode"
)
_VERIFY_16 = f"{_SPECULATIVE}.eagle_worker_common:run_eagle_verify"


def _cycle(worker: str, batch: str = "batch") -> tuple[HookPoint, ...]:
    """Return the points of a V2 worker class; `batch` is the name by which it gets its batch."""
    return (
        HookPoint("cycle", f"{worker}.forward_batch_generation", "cycle", (batch,) if batch else ()),
        HookPoint("verify", f"{worker}.verify", "verify", ("batch",)),
    )


def _draft(worker: str, graph: str, replay: str) -> tuple[HookPoint, ...]:
    """Return the points of drafting step by step; each forward of the draft model is one step."""
    return (
        HookPoint("draft", f"{worker}.draft_forward", "draft", ("forward_batch",)),
        _DRAFT_STEP,
        HookPoint("draft_graph", f"{graph}.{replay}", "draft_graph", ("forward_batch",)),
    )


def _extend(worker: str) -> tuple[HookPoint, ...]:
    return (
        HookPoint("draft_extend", f"{worker}._draft_extend_for_decode", "draft_extend"),
        HookPoint("prefill", f"{worker}._draft_extend_for_prefill", "draft_extend"),
    )


_TREE_FUNCTION = HookPoint("tree_build", f"{_SPECULATIVE}.eagle_utils:build_tree_kernel_efficient", "tree_build")
_KV_ALLOCATION = HookPoint("kv_allocation", "sglang.srt.mem_cache.allocation:alloc_for_spec_decode", "kv_allocation")
_KV_COMPACT = HookPoint("kv_compact", f"{_SPECULATIVE}.spec_utils:move_accept_tokens_to_target_kvcache", "kv_compact")
# 0.5.14 and newer.
_FUNCTIONS = (
    HookPoint("prepare", f"{_SPECULATIVE}.eagle_utils:eagle_prepare_for_verify", "prepare"),
    HookPoint("sample", f"{_SPECULATIVE}.eagle_utils:eagle_sample", "sample"),
)
# How a batch is drafted and verified around the model forwards: 0.5.16 and newer, 0.5.14 and 0.5.15, until 0.5.13.
_SHAPE_16 = (
    HookPoint("kv_prepare", f"{_SPECULATIVE}.eagle_worker_common:prepare_for_draft", "kv_prepare"),
    HookPoint("tree_build", f"{_SPECULATIVE}.eagle_worker_common:build_eagle_verify_input", "tree_build"),
    *_FUNCTIONS,
    _KV_ALLOCATION,
)
_SHAPE_14 = (
    HookPoint("kv_prepare", f"{_SPECULATIVE}.base_spec_worker:EagleDraftWorkerBase.prepare_for_draft", "kv_prepare"),
    _TREE_FUNCTION,
    *_FUNCTIONS,
)
_SHAPE_06 = (
    HookPoint("kv_prepare", f"{_SPECULATIVE}.eagle_info_v2:EagleDraftInputV2Mixin.prepare_for_v2_draft", "kv_prepare"),
    _TREE_FUNCTION,
    HookPoint("prepare", f"{_SPECULATIVE}.eagle_info_v2:EagleVerifyInputV2Mixin.prepare_for_v2_verify", "prepare"),
    HookPoint("sample", f"{_SPECULATIVE}.eagle_info_v2:EagleVerifyInputV2Mixin.sample", "sample"),
)


def _v2(name: str, versions: str, shape: tuple[HookPoint, ...], replay: str, batch: str = "batch") -> Family:
    steps = _draft(_EAGLE_DRAFT, _EAGLE_GRAPH, replay)
    points = (*_EVERYWHERE, *_cycle(_EAGLE_V2, batch), *steps, *shape, *_extend(_EAGLE_DRAFT))
    return Family(name, versions, _EAGLE_V2, points)


def _multi_layer_v2(name: str, versions: str, shape: tuple[HookPoint, ...], batch: str = "batch") -> Family:
    """The draft's layers run one after another inside draft-extend: drafting itself only puts tokens in order.

    So there are no steps and no draft graph, and accepted tokens are never moved (``finalize_tree_path=False``).
    """
    draft = HookPoint("draft", f"{_MULTI_DRAFT}.draft_forward", "draft_whole")
    points = (*_EVERYWHERE, *_cycle(_MULTI_V2, batch), draft, *shape, *_extend(_MULTI_DRAFT))
    return Family(name, versions, _MULTI_V2, points)


def _frozen_v2(name: str, versions: str, *more: HookPoint) -> Family:
    """The draft has no KV cache of its own, so none is prepared for it.

    Its first forward makes the first token, which elsewhere comes from the extend: forwards and steps do not match, so
    steps are not timed.
    """
    draft = (
        HookPoint("draft", f"{_FROZEN_DRAFT}.draft_forward", "draft_whole"),
        HookPoint("draft_graph", f"{_FROZEN_GRAPH}.execute", "draft_graph_whole"),
    )
    # The cycle is its own, verify is inherited.
    cycle, (_, verify) = _cycle(_FROZEN_V2)[0], _cycle(_EAGLE_V2)
    points = (*_EVERYWHERE, cycle, verify, *draft, _TREE_FUNCTION, *_FUNCTIONS, *_extend(_FROZEN_DRAFT))
    return Family(name, versions, _FROZEN_V2, (*points, _KV_COMPACT, *more))


_V1_KV_COMPACT = (
    HookPoint("kv_compact", "sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator.free", "kv_free"),
    HookPoint("kv_compact", "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator.free", "kv_free"),
    HookPoint("kv_compact", "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.move_kv_cache", "kv_free"),
)


def _v1(worker: str, draft: tuple[HookPoint, ...], *kv_prepare: HookPoint) -> tuple[HookPoint, ...]:
    """Return the points of a V1 worker: one class that drafts, verifies, and frees what was rejected.

    ``EagleVerifyInput.verify`` also updates the requests (``output_ids``, finish), before ``process_batch_result``.
    """
    return (
        *_EVERYWHERE,
        HookPoint("cycle", f"{worker}.forward_batch_generation", "cycle_v1", ("batch",)),
        HookPoint("verify", f"{worker}.verify", "verify_v1", ("batch",)),
        *draft,
        _TREE_FUNCTION,
        HookPoint("sample", f"{_SPECULATIVE}.eagle_info:EagleVerifyInput.verify", "sample"),
        HookPoint("draft_extend", f"{worker}.forward_draft_extend_after_decode", "draft_extend"),
        HookPoint("prefill", f"{worker}.forward_draft_extend", "draft_extend"),
        *kv_prepare,
        HookPoint("kv_prepare", f"{_SPECULATIVE}.eagle_info:EagleVerifyInput.prepare_for_verify", "kv_verify"),
        *_V1_KV_COMPACT,
    )


_EAGLE_V1 = f"{_SPECULATIVE}.eagle_worker:EAGLEWorker"
_MULTI_V1 = f"{_SPECULATIVE}.multi_layer_eagle_worker:MultiLayerEagleWorker"
_FROZEN_V1 = f"{_SPECULATIVE}.frozen_kv_mtp_worker:FrozenKVMTPWorker"

V2 = _v2("v2", "0.5.16 to 0.5.23", (*_SHAPE_16, _KV_COMPACT), "execute")
V2_14 = _v2("v2-0.5.14", "0.5.14 and 0.5.15", (*_SHAPE_14, _KV_COMPACT), "execute")
V2_13 = replace(
    _v2(
        "v2-0.5.13",
        "0.5.13",
        (*_SHAPE_06, HookPoint("kv_compact", f"{_EAGLE_V2}.move_accept_tokens_to_target_kvcache", "kv_compact")),
        "replay",
    ),
    marks=(_RESULTS_13,),
)
# Chains only (with trees SGLang falls back to V1), so accepted tokens are never moved.
V2_06 = _v2("v2-0.5.6", "0.5.6 to 0.5.12", _SHAPE_06, "replay", "model_worker_batch")

V1 = Family(
    "v1",
    "0.5.6 to 0.5.12",
    _EAGLE_V1,
    _v1(
        _EAGLE_V1,
        (
            HookPoint("draft", f"{_EAGLE_V1}.draft_forward", "draft", ("forward_batch",)),
            _DRAFT_STEP,
            HookPoint("draft_graph", f"{_EAGLE_GRAPH}.replay", "draft_graph_v1", ("forward_batch",)),
        ),
        HookPoint("kv_prepare", f"{_EAGLE_V1}._draft_preprocess_decode", "kv_prepare"),
    ),
)

MULTI_LAYER_V2 = _multi_layer_v2("multi-layer-v2", "0.5.16 to 0.5.23", _SHAPE_16)
MULTI_LAYER_V2_14 = _multi_layer_v2("multi-layer-v2-0.5.14", "0.5.14 and 0.5.15", _SHAPE_14)
# The batch is ``model_worker_batch`` until 0.5.12 and ``batch`` in 0.5.13; SGLang passes it by position.
MULTI_LAYER_V2_07 = _multi_layer_v2("multi-layer-v2-0.5.7", "0.5.7 to 0.5.13", _SHAPE_06, "")
# Its draft is written out in `draft`; what puts the tokens in order is a function of its own.
MULTI_LAYER_V1 = Family(
    "multi-layer-v1",
    "0.5.7 to 0.5.12",
    _MULTI_V1,
    _v1(
        _MULTI_V1,
        (HookPoint("draft", f"{_SPECULATIVE}.eagle_utils:organize_draft_results", "draft_whole"),),
        HookPoint("kv_prepare", f"{_MULTI_V1}._draft_preprocess_decode", "kv_prepare"),
    ),
)

FROZEN_V2 = replace(_frozen_v2("frozen-kv-mtp", "0.5.16 to 0.5.23", _KV_ALLOCATION), marks=(_VERIFY_16,))
FROZEN_V2_14 = _frozen_v2("frozen-kv-mtp-0.5.14", "0.5.14 and 0.5.15")
FROZEN_V1 = Family(
    "frozen-kv-mtp-v1",
    "0.5.12 and 0.5.13",
    _FROZEN_V1,
    _v1(
        _FROZEN_V1,
        (
            HookPoint("draft", f"{_FROZEN_V1}.draft_forward", "draft", ("forward_batch",)),
            _DRAFT_STEP,
            HookPoint("draft_graph", f"{_FROZEN_GRAPH}.replay", "draft_graph_v1", ("forward_batch",)),
        ),
    ),
)

FAMILIES: tuple[Family, ...] = (
    V2,
    V2_14,
    V2_13,
    V2_06,
    V1,
    MULTI_LAYER_V2,
    MULTI_LAYER_V2_14,
    MULTI_LAYER_V2_07,
    MULTI_LAYER_V1,
    FROZEN_V2,
    FROZEN_V2_14,
    FROZEN_V1,
)
"""Every family with a worker of its own; of one worker the newest shape first. Standalone workers are subclasses."""

GENERIC = Family(
    "generic",
    "any",
    ANY_WORKER,
    (*_EVERYWHERE, HookPoint("cycle", f"{ANY_WORKER}.forward_batch_generation", "cycle_generic", ("batch",))),
)
"""For a worker of no family (NGRAM, DFLASH, another plugin's): the cycle, its verify and what was accepted."""

PLAIN = Family(
    "plain",
    "any",
    "",
    (
        *_SCHEDULER_POINTS,
        HookPoint("cycle", _TARGET_FORWARD, "plain_cycle"),
        HookPoint("target_verify", _MODEL_FORWARD, "plain_forward"),
    ),
    knows=("verify", "draft", "draft_graph", "draft_extend", "prefill", "kv_prepare", "kv_compact"),
)
"""For a server without speculation: one forward of the target is a cycle, and nothing is drafted."""

STAGE = Family("pipeline-stage", "0.5.21 to 0.5.23", "", (_SCHEDULER_POINTS[0],))
"""For the stages of a pipeline before the last, which have no speculative worker: drafts and cycles are of the last."""

Resolves = Callable[[str], bool]


def for_worker(workers: Iterable[str], resolves: Resolves, families: tuple[Family, ...] = FAMILIES) -> Family | None:
    """Return the family of a worker class, None when there is none.

    Of a worker's shapes it is the newest one of which anything exists that the older shapes do not have, so that a
    renamed function costs its own hook and makes no old shape of a new SGLang.

    Args:
        workers: ``module:Class`` of the class and its bases, most derived first.
        resolves: Whether a target exists in this SGLang.
        families: What there is; of one worker the newest shape first.
    """
    for worker in workers:
        shapes = [family for family in families if family.worker == worker]
        for i, family in enumerate(shapes):
            older = {point.target for shape in shapes[i + 1 :] for point in shape.points}
            new = [*family.marks, *(point.target for point in family.points if point.target not in older)]
            if i == len(shapes) - 1 or any(resolves(target) for target in new):
                return family
    return None


def present(resolves: Resolves, families: tuple[Family, ...] = FAMILIES) -> tuple[Family, ...]:
    """Return the families that this SGLang has a worker for, one for each, in the order of `families`.

    A class of which nothing but a placeholder is there (frozen-KV-MTP with overlap, 0.5.12 and 0.5.13) does not count.

    Args:
        resolves: Whether a target exists in this SGLang.
        families: What there is.
    """
    found = []
    for worker in dict.fromkeys(family.worker for family in families):
        family = for_worker([worker], resolves, families)
        if family is not None:
            module = worker.partition(":")[0] + ":"
            own = [resolves(point.target) for point in family.points if point.target.startswith(module)]
            if sum(own) > len(own) / 2:
                found.append(family)
    return tuple(found)


def sglang_version() -> str:
    """Return the installed SGLang's version, "" when there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""
