"""The reader of the wheels against facts that were looked up by hand."""

from __future__ import annotations

from functools import lru_cache

import pytest

from eagle_exporter.hooks import selection
from eagle_exporter.hooks.selection import Configuration, Refused, Unknown
from eagle_exporter.hooks.source import Source
from tests.versions import wheels

SPECULATIVE = "sglang.srt.speculative"


@lru_cache(maxsize=4)
def source(version: str) -> Source:
    """A few at a time: a version's syntax trees take 40 MB."""
    return wheels.source(version)


FACTS = [
    # Version, what is asked for, where it is defined, its parameters.
    ("0.5.6", "eagle_worker:EAGLEWorker.verify", "eagle_worker:EAGLEWorker.verify", "self batch spec_info"),
    (
        "0.5.6",
        "eagle_worker_v2:EagleDraftWorker.draft_forward",
        "eagle_worker_v2:EagleDraftWorker.draft_forward",
        "self forward_batch",
    ),
    # Inherited: standalone workers have no verify of their own.
    ("0.5.12", "eagle_worker:EAGLEWorker.verify", "eagle_worker:EAGLEWorker.verify", "self batch"),
    ("0.5.12", "standalone_worker:StandaloneWorker.verify", "eagle_worker:EAGLEWorker.verify", "self batch"),
    ("0.5.12", "standalone_worker_v2:StandaloneWorkerV2.verify", "eagle_worker_v2:EAGLEWorkerV2.verify", "self batch"),
    # From a mixin, across modules.
    (
        "0.5.12",
        "eagle_info:EagleVerifyInput.sample",
        "eagle_info_v2:EagleVerifyInputV2Mixin.sample",
        "self batch logits_output vocab_mask",
    ),
    # Imported.
    ("0.5.12", "eagle_worker:build_tree_kernel_efficient", "eagle_utils:build_tree_kernel_efficient", None),
    ("0.5.16", "eagle_worker_v2:run_eagle_verify", "eagle_worker_common:run_eagle_verify", None),
    ("0.5.16", "eagle_worker_common:eagle_sample", "eagle_utils:eagle_sample", None),
    # Overridden in one place and inherited in the other.
    ("0.5.23", "frozen_kv_mtp_worker_v2:FrozenKVMTPWorkerV2.verify", "eagle_worker_v2:EAGLEWorkerV2.verify", None),
    (
        "0.5.23",
        "frozen_kv_mtp_worker_v2:FrozenKVMTPWorkerV2.forward_batch_generation",
        "frozen_kv_mtp_worker_v2:FrozenKVMTPWorkerV2.forward_batch_generation",
        None,
    ),
    (
        "0.5.23",
        "eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation",
        "eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation",
        "self batch on_publish grammar_barrier pp_proxy_tensors",
    ),
    (
        "0.5.23",
        "eagle_utils:verify_tree_greedy_func",
        "sglang.kernels.ops.speculative.spec_tree:verify_tree_greedy_func",
        None,
    ),
]


@pytest.mark.parametrize(("version", "asked", "defined", "parameters"), FACTS, ids=[f"{v}-{a}" for v, a, _, _ in FACTS])
def test_a_function_is_found_where_it_is(version: str, asked: str, defined: str, parameters: str | None) -> None:
    found = source(version).function(f"{SPECULATIVE}.{asked}")
    assert found is not None
    assert found.defined == (defined if defined.startswith("sglang.") else f"{SPECULATIVE}.{defined}")
    if parameters is not None:
        assert found.parameters == tuple(parameters.split())


TP_FORWARD = "managers.tp_worker:TpModelWorker.forward_batch_generation"
NEXT_BATCH = "managers.scheduler:Scheduler.get_next_batch_to_run"
PARAMETERS = [
    ("0.5.6", TP_FORWARD, "self model_worker_batch forward_batch is_verify skip_attn_backend_init"),
    (
        "0.5.23",
        TP_FORWARD,
        (
            "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode "
            "return_kv_loc_plan"
        ),
    ),
    ("0.5.12", NEXT_BATCH, "self"),
    ("0.5.23", NEXT_BATCH, "self running_batch last_batch"),
    (
        "0.5.23",
        "entrypoints.engine:Engine._launch_scheduler_processes",
        "cls server_args port_args run_scheduler_process_func placement_group",
    ),
    # Of a mixin of the scheduler.
    ("0.5.12", "managers.scheduler:Scheduler.process_batch_result_decode", "self batch result"),
]


@pytest.mark.parametrize(("version", "target", "parameters"), PARAMETERS)
def test_the_parameters_are_those_of_the_source(version: str, target: str, parameters: str) -> None:
    found = source(version).function(f"sglang.srt.{target}")
    assert found is not None
    assert found.parameters == tuple(parameters.split())


ABSENT = [
    ("0.5.6", "sglang.srt.plugins:load_plugins", "no module"),
    ("0.5.10", "sglang.srt.plugins:load_plugins", "no module"),
    ("0.5.6", "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes", "no function"),
    ("0.5.12", f"{SPECULATIVE}.eagle_utils:eagle_sample", "no eagle_sample"),
    ("0.5.13", f"{SPECULATIVE}.eagle_worker:EAGLEWorker.verify", "no module"),
    ("0.5.14", f"{SPECULATIVE}.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner.replay", "no function"),
    ("0.5.15", f"{SPECULATIVE}.eagle_worker_common:run_eagle_verify", "no module"),
]


@pytest.mark.parametrize(("version", "target", "reason"), ABSENT)
def test_what_is_not_there_is_not_found(version: str, target: str, reason: str) -> None:
    assert source(version).function(target) is None
    assert reason in source(version).why_not(target)


V1, V2 = "eagle_worker:EAGLEWorker", "eagle_worker_v2:EAGLEWorkerV2"
MULTI_V1, MULTI_V2 = (
    "multi_layer_eagle_worker:MultiLayerEagleWorker",
    "multi_layer_eagle_worker_v2:MultiLayerEagleWorkerV2",
)
CHOSEN = [
    # Until 0.5.10 V2 only by the environment's switch, and then for chains only (0.5.6 does not look).
    ("0.5.6", Configuration(), V1),
    ("0.5.6", Configuration(spec_v2=True), V2),
    ("0.5.6", Configuration("STANDALONE"), "standalone_worker:StandaloneWorker"),
    ("0.5.6", Configuration(multi_layer=True), None),
    ("0.5.7", Configuration(multi_layer=True), MULTI_V1),
    ("0.5.10", Configuration(), V1),
    ("0.5.10", Configuration(topk=4), V1),
    ("0.5.10", Configuration(spec_v2=True, overlap=False), V2),
    ("0.5.10", Configuration(spec_v2=True, topk=4), None),
    ("0.5.10", Configuration("FROZEN_KV_MTP"), None),
    # 0.5.11 and 0.5.12: V2, and V1 for trees and without overlap.
    *((version, Configuration(), V2) for version in ("0.5.11", "0.5.12")),
    *((version, Configuration(topk=4), V1) for version in ("0.5.11", "0.5.12")),
    *((version, Configuration(overlap=False), V1) for version in ("0.5.11", "0.5.12")),
    ("0.5.12", Configuration(spec_v2=False), V1),
    ("0.5.12", Configuration(spec_v2=True, topk=4), V1),
    ("0.5.12", Configuration(multi_layer=True), MULTI_V2),
    ("0.5.12", Configuration(multi_layer=True, overlap=False), MULTI_V1),
    ("0.5.12", Configuration("FROZEN_KV_MTP"), "frozen_kv_mtp_worker:FrozenKVMTPWorker"),
    # From 0.5.13 on there is one worker for all of it.
    *(
        (version, configuration, V2)
        for version in ("0.5.13", "0.5.16", "0.5.23")
        for configuration in (
            Configuration(),
            Configuration(overlap=False),
            Configuration(topk=4),
            Configuration(spec_v2=False),
        )
    ),
    ("0.5.13", Configuration("FROZEN_KV_MTP"), "frozen_kv_mtp_worker:FrozenKVMTPWorker"),
    ("0.5.14", Configuration("FROZEN_KV_MTP"), "frozen_kv_mtp_worker_v2:FrozenKVMTPWorkerV2"),
    ("0.5.23", Configuration("STANDALONE", overlap=False), "standalone_worker_v2:StandaloneWorkerV2"),
    ("0.5.23", Configuration(multi_layer=True, overlap=False), MULTI_V2),
    ("0.5.23", Configuration("NGRAM"), "ngram_worker:NGRAMWorker"),
]


@pytest.mark.parametrize(("version", "configuration", "worker"), CHOSEN, ids=[f"{v}-{c}" for v, c, _ in CHOSEN])
def test_the_worker_is_the_one_that_sglang_makes(
    version: str, configuration: Configuration, worker: str | None
) -> None:
    if worker is None:
        with pytest.raises(Refused):
            selection.worker_class(source(version), configuration)
    else:
        assert selection.worker_class(source(version), configuration) == f"{SPECULATIVE}.{worker}"


def test_a_way_to_decide_that_nobody_knows_is_told_as_such() -> None:
    wheel = wheels.source("0.5.23")
    path = "sglang/srt/speculative/spec_info.py"
    text = wheel.text(path)
    assert text is not None
    assert b"return EAGLEWorkerV2" in text
    for change in (b"return self.something_new(server_args)", b"return names_nobody_imported", b"return 5"):
        changed = wheel.changed({path: text.replace(b"return EAGLEWorkerV2", change)})
        with pytest.raises(Unknown, match="spec_info"):
            selection.worker_class(changed, Configuration())
    with pytest.raises(Unknown, match="spec_info"):
        selection.worker_class(wheel.changed({path: b""}), Configuration())


def test_fields_are_seen_where_they_are_put() -> None:
    found = source("0.5.12").attributes("sglang.srt.managers.scheduler:Scheduler")
    assert found["running_batch"] == "sglang.srt.managers.scheduler:Scheduler"
    assert found["update_spec_metrics"] == "sglang.srt.observability.scheduler_metrics_mixin:SchedulerMetricsMixin"
    result = source("0.5.12").attributes("sglang.srt.managers.utils:GenerationBatchResult")
    assert {"accept_lens", "num_correct_drafts_per_req_cpu"} <= set(result)
    assert "num_accepted_tokens" not in result
