"""Which rank this is, and what it was configured to do: read once, when ``Scheduler.__init__`` is done.

``ServerArgs`` holds raw operator input from 0.5.19 on; resolved values come from SGLang's own resolution, worker
attributes, or the model runner, in this order of trust.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_exporter import catalogue
from eagle_exporter.hooks import points

logger = logging.getLogger(__name__)

UNKNOWN = ""


@dataclass(frozen=True)
class Rank:
    """One rank's identity.

    Attributes:
        tp_rank: Tensor-parallel rank.
        pp_rank: Pipeline-parallel rank.
        dp_rank: Data-parallel rank, None without data parallelism.
        recording: This rank counts acceptance: attention-TP rank 0, attention-CP rank 0, last pipeline stage.
        last_stage: It is of the last pipeline stage.
    """

    tp_rank: int
    pp_rank: int
    dp_rank: int | None
    recording: bool
    last_stage: bool = True


def argument(server_args: Any, name: str, default: Any = None) -> Any:
    """Return a resolved server argument of any SGLang version."""
    try:
        from sglang.srt.arg_groups.overrides import resolution_result  # 0.5.19 and newer

        missing = object()
        value = resolution_result(server_args, name, missing)
        if value is not missing:
            return value
    except Exception:  # noqa: S110 - an older SGLang resolves in place
        pass
    return getattr(server_args, name, default)


def rank_of(scheduler: Any) -> Rank:
    """Return the rank of an initialised ``Scheduler``.

    Ranks are on the scheduler itself until 0.5.12, on ``scheduler.ps`` from 0.5.13 to 0.5.20, and only in the runtime
    context from 0.5.21 on.

    Raises:
        ValueError: None of them knows the tensor-parallel rank.
    """
    sources = [scheduler.ps] if getattr(scheduler, "ps", None) is not None else []
    sources += [scheduler, _parallel_context()]

    def read(name: str, default: Any) -> Any:
        for source in sources:
            value = getattr(source, name, None)
            if value is not None:
                return value
        return default

    if read("tp_rank", None) is None:
        raise ValueError("this SGLang tells its ranks in none of the known places")

    pp_rank, pp_size = read("pp_rank", 0), read("pp_size", 1)
    return Rank(
        tp_rank=read("tp_rank", 0),
        pp_rank=pp_rank,
        dp_rank=read("dp_rank", None),
        recording=read("attn_tp_rank", 0) == 0 and read("attn_cp_rank", 0) == 0 and pp_rank == pp_size - 1,
        last_stage=pp_rank == pp_size - 1,
    )


def _parallel_context() -> Any:
    try:
        from sglang.srt.runtime_context import get_parallel  # 0.5.14 and newer

        return get_parallel()
    except Exception:  # an older SGLang, or one that has published none
        return None


def common_labels(server: str, scheduler: Any, rank: Rank) -> dict[str, str]:
    """Return the labels of every series, with SGLang's own values so that joins work."""
    server_args = scheduler.server_args
    mode = str(argument(server_args, "disaggregation_mode", "null") or "null")
    model = argument(server_args, "served_model_name") or argument(server_args, "model_path", UNKNOWN)
    return {
        "server": server,
        "model_name": str(model),
        "engine_type": "unified" if mode == "null" else mode,
        "tp_rank": str(rank.tp_rank),
        "pp_rank": str(rank.pp_rank),
        "dp_rank": "" if rank.dp_rank is None else str(rank.dp_rank),
    }


def num_steps_tiers(worker: Any, server_args: Any, *, counts_steps: bool = True) -> tuple[int, ...]:
    """Return the step counts that the server can switch between, the configured one first.

    Args:
        worker: The speculative worker.
        server_args: SGLang's arguments.
        counts_steps: False for a worker that need not draft step by step (NGRAM, DFLASH): of it one token less than it
            verifies is the most that can be accepted.

    Raises:
        ValueError: The configured step count cannot be read.
    """
    configured = _speculative(worker, server_args, "speculative_num_steps", "speculative_num_steps", None)
    tokens = _speculative(worker, server_args, "speculative_num_draft_tokens", "speculative_num_draft_tokens", None)
    if tokens is not None and (configured is None or not counts_steps):
        configured = int(tokens) - 1
    if configured is None:
        raise ValueError("the number of draft steps is not known")
    tiers = [int(configured)]
    controller = getattr(worker, "adaptive_controller", None)
    for steps in getattr(controller, "candidate_steps", None) or ():
        if int(steps) not in tiers:
            tiers.append(int(steps))
    return tuple(tiers)


def spec_config(
    scheduler: Any, worker: Any, hook_family: str, others: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the label values of ``eagle_spec_config_info``.

    Args:
        scheduler: The initialised scheduler.
        worker: Its speculative worker, None without speculation.
        hook_family: Name of the hook point family.
        others: Label values of the NCCL, all-reduce and GPU info families, which go into ``config_id`` too.
    """
    server_args = scheduler.server_args
    runner = _model_runner(scheduler)
    draft = draft_side(worker)
    draft_runner = next(iter(draft_runners(worker)), None)
    adaptive = bool(argument(server_args, "speculative_adaptive", False))
    graph = getattr(runner, "decode_cuda_graph_runner", None) or getattr(runner, "graph_runner", None)
    draft_backend = getattr(draft, "draft_attn_backend", None)
    facts = {
        "algorithm": argument(server_args, "speculative_algorithm") or "NONE",
        "hook_family": hook_family,
        "num_steps": _speculative(worker, server_args, "speculative_num_steps", "speculative_num_steps", 0),
        "topk": _speculative(worker, server_args, "topk", "speculative_eagle_topk", 0),
        "num_draft_tokens": _speculative(
            worker, server_args, "speculative_num_draft_tokens", "speculative_num_draft_tokens", 1
        ),
        "adaptive": adaptive,
        "attention_backend": _class_name(getattr(runner, "attn_backend", None)),
        "draft_attention_backend": _class_name(draft_backend or getattr(draft_runner, "attn_backend", None)),
        "overlap": bool(getattr(scheduler, "enable_overlap", False)),
        "cuda_graph": graph is not None,
        "tp_size": argument(server_args, "tp_size", 1),
        "pp_size": argument(server_args, "pp_size", 1),
        "dp_size": argument(server_args, "dp_size", 1),
        "ep_size": argument(server_args, "ep_size", 1),
        "page_size": getattr(scheduler, "page_size", None) or argument(server_args, "page_size", 1),
        "draft_model": argument(server_args, "speculative_draft_model_path") or UNKNOWN,
        "sglang_version": points.sglang_version(),
        "torch_version": _torch_version(),
    }
    values = {name: _text(value) for name, value in facts.items()}
    # The running server changes num_steps by itself when it is adaptive: that is no new configuration.
    moving = {name: value for name, value in values.items() if not (adaptive and name == "num_steps")}
    moving["model"] = _text(argument(server_args, "model_path", UNKNOWN))
    for family, labels in sorted(others.items()):
        # Of the GPU only the name: another card of the same kind costs the same.
        moving[family] = labels[-1] if family == "eagle_gpu_info" else "|".join(labels)
    digest = hashlib.sha256(json.dumps(moving, sort_keys=True).encode()).hexdigest()
    values["config_id"] = digest[:8]
    return tuple(values[name] for name in catalogue.SPEC_CONFIG_LABELS)


def _speculative(worker: Any, server_args: Any, attribute: str, name: str, without: int | None) -> Any:
    """Return a setting of speculation: from the worker, or the arguments where a pipeline stage has none.

    Args:
        worker: The speculative worker, None when there is none.
        server_args: SGLang's arguments.
        attribute: Of the worker.
        name: Of the argument.
        without: What it is without speculation.
    """
    value = getattr(worker, attribute, None)
    if value is None and argument(server_args, "speculative_algorithm"):
        value = argument(server_args, name)
    return without if value is None else value


def nccl_config() -> tuple[str, ...]:
    """Return the label values of ``eagle_nccl_config_info``."""
    version = UNKNOWN
    try:
        import torch

        if torch.cuda.is_available():
            version = ".".join(str(part) for part in torch.cuda.nccl.version())
    except Exception:
        logger.debug("no NCCL version", exc_info=True)
    return (version, *(os.environ.get(variable, "") for variable in catalogue.NCCL_VARIABLES.values()))


def allreduce_config(server_args: Any) -> tuple[str, ...]:
    """Return the label values of ``eagle_allreduce_config_info``: what SGLang was allowed to use."""
    return tuple(
        _text(value)
        for value in (
            not argument(server_args, "disable_custom_all_reduce", False),
            argument(server_args, "enable_nccl_nvls", False),
            argument(server_args, "enable_symm_mem", False),
            argument(server_args, "enable_flashinfer_allreduce_fusion", False),
            argument(server_args, "enable_torch_symm_mem", False),
        )
    )


def gpu() -> tuple[str, ...] | None:
    """Return the label values of ``eagle_gpu_info``, None on the CPU.

    The index is the process's own (CUDA_VISIBLE_DEVICES applies); ``uuid`` and PCI id identify the card.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", UNKNOWN))
    if uuid and not uuid.startswith("GPU-"):
        uuid = f"GPU-{uuid}"  # as NVML and the DCGM exporter spell it
    bus = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    pci = UNKNOWN if None in bus else "{:08X}:{:02X}:{:02X}.0".format(*(int(part or 0) for part in bus))
    return (str(device), uuid, pci, str(properties.name))


def draft_side(worker: Any) -> Any:
    """Return the object that drafts: V2 has a draft worker inside its worker, a V1 worker drafts itself."""
    draft = getattr(worker, "draft_worker", None)
    return worker if draft is None else draft


def draft_runners(worker: Any) -> list[Any]:
    """Return the model runners of the draft: several for the multi-layer workers, none when not known."""
    draft = draft_side(worker)
    for name in ("draft_runner_list", "model_runner_list"):  # multi-layer V2, multi-layer V1
        runners = getattr(draft, name, None)
        if runners:
            return list(runners)
    for name in ("draft_runner", "draft_model_runner"):  # V2, V1
        runner = getattr(draft, name, None)
        if runner is not None:
            return [runner]
    return []


def draft_memory_bytes(worker: Any) -> float | None:
    """Return the bytes of the draft model's parameters, None when not known.

    Tensors shared with the target (embedding, lm_head) are counted once in the target, so not here; what the draft's
    layers share among each other is counted once.
    """
    target = getattr(getattr(worker, "target_worker", None), "model_runner", None)
    models = [runner.model for runner in draft_runners(worker) if getattr(runner, "model", None) is not None]
    if not models:
        return None
    seen = {p.data_ptr() for p in target.model.parameters()} if target is not None else set()
    total = 0
    for model in models:
        for p in model.parameters():
            if p.data_ptr() not in seen:
                seen.add(p.data_ptr())
                total += p.numel() * p.element_size()
    return float(total)


def kv_pool_tokens(scheduler: Any) -> float | None:
    """Return the capacity of the KV cache in tokens."""
    value = getattr(scheduler, "max_total_num_tokens", None)
    return None if value is None else float(value)


def guarded(what: str, read: Callable[[], Any], default: Any) -> Any:
    """Return ``read()``, or `default` with a warning: a missing fact must not cost the measurement."""
    try:
        return read()
    except Exception:
        logger.warning("eagle-exporter: cannot tell %s of this SGLang", what, exc_info=True)
        return default


def _model_runner(scheduler: Any) -> Any:
    return getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)


def _class_name(value: Any) -> str:
    return UNKNOWN if value is None else type(value).__name__


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return UNKNOWN if value is None else str(value)
