from __future__ import annotations

import logging
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_exporter import catalogue
from eagle_exporter.hooks import identity, points


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A torch without CUDA."""
    module = types.ModuleType("torch")
    module.__version__ = "2.13.0"  # type: ignore[attr-defined]
    module.cuda = SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang 0.5.19 and newer: resolved values lie beside the raw ``ServerArgs``."""
    values: dict[str, Any] = {}
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    overrides = types.ModuleType("sglang.srt.arg_groups.overrides")
    overrides.resolution_result = lambda _args, name, missing: values.get(name, missing)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, overrides.__name__, overrides)
    return values


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "model_path": "/models/target",
            "served_model_name": None,
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3,
            "speculative_draft_model_path": "/models/draft",
            "tp_size": 2,
            **changes,
        }
    )


def scheduler(server_args: Any = None, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"server_args": server_args or arguments(), "tp_rank": 0, **changes})


def worker(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"speculative_num_steps": 3, "topk": 4, "speculative_num_draft_tokens": 8, "draft_worker": None, **changes}
    )


def test_ranks_that_are_nowhere_are_not_guessed() -> None:
    """Two ranks that both took themselves for rank 0 would fight for one file."""
    with pytest.raises(ValueError, match="ranks"):
        identity.rank_of(SimpleNamespace())


# --- arguments -------------------------------------------------------------------------------------------
def test_an_older_sglang_has_its_arguments_resolved_in_place() -> None:
    assert identity.argument(arguments(), "tp_size") == 2
    assert identity.argument(arguments(), "nothing", 7) == 7


def test_a_resolved_value_wins_over_the_raw_one(resolved: dict[str, Any]) -> None:
    resolved["tp_size"] = 8
    resolved["speculative_algorithm"] = None
    assert identity.argument(arguments(), "tp_size") == 8
    assert identity.argument(arguments(), "speculative_algorithm") is None
    assert identity.argument(arguments(), "model_path") == "/models/target"


# --- ranks -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("facts", "recording"),
    [
        ({"tp_rank": 0}, True),
        ({"tp_rank": 1, "attn_tp_rank": 1}, False),
        ({"tp_rank": 4, "attn_tp_rank": 0, "dp_rank": 1}, True),  # the leader of its attention group
        ({"tp_rank": 0, "attn_cp_rank": 1}, False),
        ({"tp_rank": 0, "pp_rank": 0, "pp_size": 2}, False),
        ({"tp_rank": 0, "pp_rank": 1, "pp_size": 2}, True),
    ],
)
@pytest.mark.parametrize("place", ["scheduler", "parallel state", "runtime context"])
def test_one_rank_of_a_group_counts_acceptance(
    facts: dict[str, int], recording: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks lie on the scheduler up to 0.5.15, in its parallel state to 0.5.20, then in the runtime context."""
    made = SimpleNamespace(**facts) if place == "scheduler" else SimpleNamespace()
    if place == "parallel state":
        made.ps = SimpleNamespace(**facts)
    if place == "runtime context":
        for name in ("sglang", "sglang.srt"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        context = types.ModuleType("sglang.srt.runtime_context")
        context.get_parallel = lambda: SimpleNamespace(**facts)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, context.__name__, context)
    rank = identity.rank_of(made)
    assert rank.tp_rank == facts["tp_rank"]
    assert rank.recording is recording
    assert rank.dp_rank == facts.get("dp_rank")


def test_labels_have_sglangs_own_values() -> None:
    made = scheduler(arguments(served_model_name="kimi"), tp_rank=3, dp_rank=1)
    labels = identity.common_labels("node:1", made, identity.rank_of(made))
    assert labels == {
        "server": "node:1",
        "model_name": "kimi",
        "engine_type": "unified",
        "tp_rank": "3",
        "pp_rank": "0",
        "dp_rank": "1",
    }
    assert tuple(labels) == catalogue.COMMON_LABELS


def test_a_model_without_a_name_is_called_by_its_path_and_no_dp_rank_is_empty() -> None:
    made = scheduler()
    labels = identity.common_labels("s", made, identity.rank_of(made))
    assert labels["model_name"] == "/models/target"
    assert labels["dp_rank"] == ""


@pytest.mark.parametrize(("mode", "engine"), [("null", "unified"), (None, "unified"), ("prefill", "prefill")])
def test_a_disaggregated_engine_says_its_half(mode: str | None, engine: str) -> None:
    made = scheduler(arguments(disaggregation_mode=mode))
    assert identity.common_labels("s", made, identity.rank_of(made))["engine_type"] == engine


# --- tiers -----------------------------------------------------------------------------------------------
def test_the_tiers_are_the_configured_one_and_those_it_may_switch_to() -> None:
    adaptive = SimpleNamespace(candidate_steps=[1, 3, 5])
    assert identity.num_steps_tiers(worker(), arguments()) == (3,)
    assert identity.num_steps_tiers(worker(adaptive_controller=adaptive), arguments()) == (3, 1, 5)
    assert identity.num_steps_tiers(SimpleNamespace(), arguments()) == (3,)


def test_a_worker_that_counts_no_steps_has_one_less_than_it_verifies() -> None:
    """NGRAM, DFLASH, UNO."""
    made = SimpleNamespace(speculative_num_draft_tokens=8, speculative_num_steps=1)
    assert identity.num_steps_tiers(made, arguments(), counts_steps=False) == (7,)
    assert identity.num_steps_tiers(made, arguments()) == (1,)
    assert identity.num_steps_tiers(
        SimpleNamespace(speculative_num_draft_tokens=4), arguments(speculative_num_steps=None)
    ) == (3,)


def test_an_unknown_number_of_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="draft steps"):
        identity.num_steps_tiers(SimpleNamespace(), arguments(speculative_num_steps=None))


# --- configuration ---------------------------------------------------------------------------------------
def config(made: Any = None, made_worker: Any = None, **others: tuple[str, ...]) -> dict[str, str]:
    values = identity.spec_config(made or scheduler(), made_worker or worker(), "v2", others)
    return dict(zip(catalogue.SPEC_CONFIG_LABELS, values, strict=True))


def test_the_configuration_is_all_text() -> None:
    values = config()
    assert values["num_steps"] == "3"
    assert values["topk"] == "4"
    assert values["num_draft_tokens"] == "8"
    assert values["adaptive"] == "false"
    assert values["tp_size"] == "2"
    assert values["torch_version"] == "2.13.0"
    assert values["draft_model"] == "/models/draft"
    assert all(isinstance(value, str) and value != "None" for value in values.values())


def test_the_config_id_is_eight_hexadecimal_digits_and_stable() -> None:
    first, again = config()["config_id"], config()["config_id"]
    assert first == again
    assert len(first) == 8
    int(first, 16)


NCCL = ("2.27", "LL", *[""] * (len(catalogue.NCCL_VARIABLES) - 1))


def test_whatever_moves_the_cost_changes_the_config_id() -> None:
    made = [
        config(),
        config(made_worker=worker(speculative_num_steps=5)),
        config(made_worker=worker(topk=1)),
        config(scheduler(arguments(model_path="/models/other"))),
        config(scheduler(arguments(tp_size=4))),
        config(scheduler(enable_overlap=True)),
        config(eagle_nccl_config_info=NCCL),
        config(eagle_gpu_info=("0", "GPU-1", "0:1", "H200")),
        config(eagle_gpu_info=("0", "GPU-1", "0:1", "B200")),
    ]
    assert len({values["config_id"] for values in made}) == len(made)


def test_another_card_of_the_same_kind_does_not_change_the_config_id() -> None:
    first = config(eagle_gpu_info=("0", "GPU-1", "0:1", "H200"))
    second = config(eagle_gpu_info=("5", "GPU-2", "0:9", "H200"))
    assert first["config_id"] == second["config_id"]


def test_a_server_that_switches_its_steps_itself_keeps_its_config_id() -> None:
    adaptive = scheduler(arguments(speculative_adaptive=True))
    one = config(adaptive, worker(speculative_num_steps=1))
    five = config(adaptive, worker(speculative_num_steps=5))
    assert one["config_id"] == five["config_id"]
    assert one["num_steps"] != five["num_steps"]


def test_without_speculation_there_is_a_configuration_too() -> None:
    made = scheduler(arguments(speculative_algorithm=None, speculative_draft_model_path=None))
    values = dict(zip(catalogue.SPEC_CONFIG_LABELS, identity.spec_config(made, None, "v2", {}), strict=True))
    assert (values["algorithm"], values["num_steps"], values["draft_model"]) == ("NONE", "0", "")


# --- surroundings ----------------------------------------------------------------------------------------
def test_a_pipeline_stage_without_a_worker_says_how_the_server_speculates() -> None:
    made = scheduler(arguments(speculative_eagle_topk=4, speculative_num_draft_tokens=8))
    stage = dict(zip(catalogue.SPEC_CONFIG_LABELS, identity.spec_config(made, None, "v2", {}), strict=True))
    assert (stage["num_steps"], stage["topk"], stage["num_draft_tokens"]) == ("3", "4", "8")


def test_nccl_variables_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in catalogue.NCCL_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    values = dict(zip(("version", *catalogue.NCCL_VARIABLES), identity.nccl_config(), strict=True))
    assert values.pop("proto") == "LL"
    assert set(values.values()) == {""}


def test_all_reduce_labels_match_the_catalogue() -> None:
    values = dict(
        zip(
            catalogue.ALLREDUCE_LABELS,
            identity.allreduce_config(arguments(disable_custom_all_reduce=True, enable_nccl_nvls=True)),
            strict=True,
        )
    )
    assert values["custom_all_reduce"] == "false"
    assert values["nvls"] == "true"
    assert values["symmetric_memory"] == "false"


def test_there_is_no_gpu_on_the_cpu() -> None:
    assert identity.gpu() is None


@pytest.mark.parametrize("uuid", ["GPU-7f2c", "7f2c"])
def test_a_gpu_is_named_as_other_exporters_name_it(torch: Any, uuid: str) -> None:
    properties = SimpleNamespace(uuid=uuid, name="NVIDIA H200", pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)
    torch.cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 3, get_device_properties=lambda _device: properties
    )
    assert identity.gpu() == ("3", "GPU-7f2c", "00000000:4B:00.0", "NVIDIA H200")


class Parameter:
    def __init__(self, pointer: int, numbers: int) -> None:
        self.pointer, self.numbers = pointer, numbers

    def data_ptr(self) -> int:
        return self.pointer

    def numel(self) -> int:
        return self.numbers

    def element_size(self) -> int:
        return 2


def model(*parameters: Parameter) -> Any:
    return SimpleNamespace(model=SimpleNamespace(parameters=lambda: list(parameters)))


def test_draft_memory_leaves_out_what_the_target_has_already() -> None:
    shared = Parameter(1, 1000)
    made = worker(
        draft_worker=SimpleNamespace(draft_runner=model(shared, Parameter(2, 10))),
        target_worker=SimpleNamespace(model_runner=model(shared, Parameter(3, 500))),
    )
    assert identity.draft_memory_bytes(made) == 20
    assert identity.draft_memory_bytes(worker()) is None


@pytest.mark.parametrize(
    ("draft", "inside"),
    [
        ({"draft_runner": model(Parameter(2, 10))}, True),  # V2
        (
            {"draft_runner_list": [model(Parameter(2, 6), Parameter(4, 3)), model(Parameter(2, 6), Parameter(5, 1))]},
            True,
        ),
        ({"draft_model_runner": model(Parameter(2, 10))}, False),  # V1
        ({"model_runner_list": [model(Parameter(2, 4)), model(Parameter(6, 6))]}, False),
    ],
    ids=["v2", "multi-layer v2", "v1", "multi-layer v1"],
)
def test_the_draft_of_every_worker_is_found(draft: dict[str, Any], inside: bool) -> None:
    """V2 has a draft worker inside its worker, V1 drafts itself; layers share what they share."""
    made = worker(draft_worker=SimpleNamespace(**draft)) if inside else worker(**draft)
    assert identity.draft_memory_bytes(made) == 10 * 2
    assert len(identity.draft_runners(made)) == max(
        len(value) if isinstance(value, list) else 1 for value in draft.values()
    )


def test_the_pool_is_the_schedulers() -> None:
    assert identity.kv_pool_tokens(scheduler(max_total_num_tokens=4096)) == 4096.0
    assert identity.kv_pool_tokens(scheduler()) is None


def test_a_fact_that_cannot_be_read_costs_a_warning_only(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> str:
        raise AttributeError("gone")

    with caplog.at_level(logging.WARNING):
        assert identity.guarded("the colour", missing, "default") == "default"
    assert "the colour" in caplog.text


def test_hook_points_name_hooks_of_the_catalogue() -> None:
    for family in points.FAMILIES:
        assert {point.hook for point in family.points} <= set(catalogue.HOOKS)
        targets = [point.target for point in family.points]
        assert len(set(targets)) == len(targets)
