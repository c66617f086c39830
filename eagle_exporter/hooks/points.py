"""Where each hook attaches, per family of SGLang versions.

A family is picked by what resolves, not by the version string. Sources: the ``sglang`` wheels named with each family.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

_SPECULATIVE = "sglang.srt.speculative"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"

SCHEDULER_INIT = f"{_SCHEDULER}.__init__"
LAUNCH_SCHEDULERS = "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes"
"""0.5.11 to 0.5.23: a classmethod that gets the server's arguments before any child exists."""


@dataclass(frozen=True)
class HookPoint:
    """One function of SGLang that a hook wraps.

    Attributes:
        hook: Logical name, one of `catalogue.HOOKS`.
        target: ``module:path``, see `attach.resolve`.
        role: Which wrapper of `session.Session` is used; several points can share a hook.
        reads: Parameter names that the wrapper looks at, checked by ``doctor`` and the compatibility test.
    """

    hook: str
    target: str
    role: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """The hook points of a range of SGLang versions.

    Attributes:
        name: Value of the ``hook_family`` label.
        versions: For people.
        probe: The family applies when this target resolves.
        points: What to wrap.
    """

    name: str
    versions: str
    probe: str
    points: tuple[HookPoint, ...]


V2 = Family(
    name="v2",
    versions="0.5.16 to 0.5.23",
    probe=f"{_SPECULATIVE}.eagle_worker_common:run_eagle_verify",
    points=(
        HookPoint("scheduler", f"{_SCHEDULER}.get_next_batch_to_run", "scheduler"),
        HookPoint("accept", f"{_SCHEDULER}.process_batch_result", "accept", ("batch", "result")),
        HookPoint(
            "cycle", f"{_SPECULATIVE}.eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation", "cycle", ("batch",)
        ),
        HookPoint("verify", f"{_SPECULATIVE}.eagle_worker_v2:EAGLEWorkerV2.verify", "verify", ("batch",)),
        HookPoint(
            "target_verify",
            "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
            "target_verify",
            ("is_verify",),
        ),
        HookPoint("draft", f"{_SPECULATIVE}.eagle_worker_v2:EagleDraftWorker.draft_forward", "draft"),
        HookPoint("draft", "sglang.srt.model_executor.model_runner:ModelRunner.forward", "draft_step"),
        HookPoint(
            "draft_graph",
            f"{_SPECULATIVE}.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner.execute",
            "draft_graph",
            ("forward_batch",),
        ),
        HookPoint("tree_build", f"{_SPECULATIVE}.eagle_worker_common:build_eagle_verify_input", "tree_build"),
        HookPoint("prepare", f"{_SPECULATIVE}.eagle_utils:eagle_prepare_for_verify", "prepare"),
        HookPoint("sample", f"{_SPECULATIVE}.eagle_utils:eagle_sample", "sample"),
        HookPoint(
            "draft_extend",
            f"{_SPECULATIVE}.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode",
            "draft_extend",
        ),
        HookPoint(
            "prefill", f"{_SPECULATIVE}.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill", "draft_extend"
        ),
        HookPoint("kv_prepare", f"{_SPECULATIVE}.eagle_worker_common:prepare_for_draft", "kv_prepare"),
        HookPoint("kv_compact", f"{_SPECULATIVE}.spec_utils:move_accept_tokens_to_target_kvcache", "kv_compact"),
        HookPoint("kv_allocation", "sglang.srt.mem_cache.allocation:alloc_for_spec_decode", "kv_allocation"),
    ),
)

FAMILIES: tuple[Family, ...] = (V2,)


def sglang_version() -> str:
    """Return the installed SGLang's version, "" when there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""
