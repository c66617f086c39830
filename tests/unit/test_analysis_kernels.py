"""What captures of kernels say: sums that add up, and a finding only where its evidence is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.analysis import kernels
from eagle_exporter.analysis.kernels import Captured, findings, pool
from eagle_exporter.kernels.classes import Classifier
from eagle_exporter.kernels.trace import analyse, document
from tests.unit import kernel_traces

property_test = settings(deadline=None)

# One verify of 10 ms of a dense model on one GPU, in which nothing stands out.
DENSE = {"gemm": 0.0076, "attention": 0.0016, "norm": 0.0003, "kv": 0.0002, "other": 0.0001}


def captured(
    verify: Mapping[str, float] = DENSE,
    *,
    idle: float = 0.0003,
    rank: str = "tp0",
    cycles: float = 10.0,
    age: float | None = 180.0,
    sampling: float = 0.00001,
) -> Captured:
    """What a capture of so many equal cycles adds; seconds per cycle."""
    overhead = {"sampling": sampling, "memcpy": 0.00001}
    busy = {"target_verify": sum(verify.values()), "verify_overhead": sum(overhead.values())}
    return Captured(
        cycles=cycles,
        ranks=(rank,),
        kernel_seconds={
            (phase, name): seconds * cycles
            for phase, classes in (("target_verify", verify), ("verify_overhead", overhead))
            for name, seconds in classes.items()
        },
        busy_seconds={phase: seconds * cycles for phase, seconds in busy.items()},
        phase_seconds={
            "target_verify": (busy["target_verify"] + idle) * cycles,
            "verify_overhead": busy["verify_overhead"] * cycles,
        },
        age=age,
    )


def with_allreduce(nccl: float, custom: float = 0.0, **changes: float) -> Captured:
    """A verify in which all-reduce takes so many seconds."""
    return captured({**DENSE, "allreduce_nccl": nccl, "allreduce_custom": custom}, idle=changes.get("idle", 0.0003))


def only(found: tuple[str, ...]) -> str:
    (sentence,) = found
    return sentence


class TestFigures:
    def test_classes_and_idle_time_add_up_to_the_phase(self) -> None:
        one = captured(idle=0.002)
        total = sum(seconds for _, seconds in one.classes("target_verify")) + (one.idle("target_verify") or 0.0)
        assert total == pytest.approx(one.phase("target_verify"))
        assert one.share("target_verify", "gemm") == pytest.approx(0.0076 / 0.0118)
        assert one.idle_share("target_verify") == pytest.approx(0.002 / 0.0118)

    def test_the_most_expensive_class_comes_first_and_one_that_took_no_time_not_at_all(self) -> None:
        assert [name for name, _ in captured().classes("target_verify")] == ["gemm", "attention", "norm", "kv", "other"]

    def test_kernels_side_by_side_make_no_negative_idle_time(self) -> None:
        one = captured()
        overlapping = replace(one, busy_seconds={"target_verify": one.phase_seconds["target_verify"] * 1.01})
        assert overlapping.idle("target_verify") == 0.0

    @pytest.mark.parametrize("nothing", [Captured(0.0), Captured(10.0), captured(cycles=0.0)])
    def test_without_a_captured_cycle_or_phase_nothing_is_known(self, nothing: Captured) -> None:
        assert nothing.phase("target_verify") is None
        assert nothing.idle_share("target_verify") is None
        assert nothing.share("target_verify", "gemm") is None
        assert findings([[nothing]]) == ()

    def test_ranks_are_pooled_as_sums_over_sums(self) -> None:
        few, many = captured(cycles=5.0, rank="tp0"), captured({"gemm": 0.02}, cycles=15.0, rank="tp1", age=60.0)
        together = pool([few, many, Captured(0.0, ("tp2",))])
        assert together.kernels("target_verify", "gemm") == pytest.approx((5 * 0.0076 + 15 * 0.02) / 20)
        assert together.ranks == ("tp0", "tp1")
        assert together.age == 60.0

    @property_test
    @given(st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1e-5, 1.0)), min_size=1, max_size=8))
    def test_a_mean_over_ranks_lies_between_theirs(self, ranks: list[tuple[float, float]]) -> None:
        parts = [captured({"gemm": seconds}, cycles=cycles) for cycles, seconds in ranks]
        mean = pool(parts).kernels("target_verify", "gemm")
        assert min(s for _, s in ranks) * (1 - 1e-9) <= mean <= max(s for _, s in ranks) * (1 + 1e-9)

    @pytest.mark.parametrize(
        ("one", "words"),
        [
            (captured(), "10 captured cycles of tp0, the last 3 min ago"),
            (captured(cycles=1.0, age=None), "1 captured cycle of tp0"),
            (
                pool(captured(rank=f"tp{rank}", age=7200.0) for rank in range(8)),
                "10 captured cycles of each of 8 ranks",
            ),
            # What increase() gives is a fraction where it extrapolates.
            (captured(cycles=10.03, age=5.0), "10 captured cycles of tp0, the last 5 s ago"),
        ],
    )
    def test_the_evidence_names_cycles_rank_and_age(self, one: Captured, words: str) -> None:
        assert one.evidence.startswith(words)

    @pytest.mark.parametrize(
        ("seconds", "words"), [(-1.0, "0 s"), (90.0, "90 s"), (300.0, "5 min"), (7300.0, "2 h"), (200000.0, "2 d")]
    )
    def test_ages_in_words(self, seconds: float, words: str) -> None:
        assert kernels.ago(seconds) == f"{words} ago"


class TestAllReduce:
    def test_of_nccl_with_nothing_set_suggests_the_protocol_and_says_on_what_evidence(self) -> None:
        text = only(findings([[with_allreduce(0.0152)]]))
        assert text.startswith("60% of verify is all-reduce by NCCL's own kernels (15.20 ms of 25.30 ms; 10 captured")
        assert "try NCCL_PROTO=LL" in text
        assert "cycles of tp0, the last 3 min ago" in text

    def test_a_setting_that_is_there_is_not_suggested_again(self) -> None:
        text = only(findings([[with_allreduce(0.0152)]], facts={"nccl_proto": "LL"}))
        assert "NCCL_PROTO=LL is set already; try NCCL_ALGO=Ring" in text
        text = only(findings([[with_allreduce(0.0152)]], facts={"nccl_proto": "LL", "nccl_algo": "Ring"}))
        assert "try NCCL" not in text
        assert "NCCL_P2P_LEVEL" in text

    @pytest.mark.parametrize("facts", [{"allreduce_nvls": "true"}, {"nccl_nvls": "1"}, {"nccl_nvls": "2"}])
    def test_with_nvls_inside_nccl_no_protocol_is_suggested(self, facts: dict[str, str]) -> None:
        text = only(findings([[with_allreduce(0.0152)]], facts=facts))
        assert "NVLS is on" in text
        assert "change nothing" in text
        assert "try NCCL" not in text
        off = {name: {"true": "false"}.get(value, "0") for name, value in facts.items()}
        assert "try NCCL_PROTO=LL" in only(findings([[with_allreduce(0.0152)]], facts=off))

    def test_custom_all_reduce_that_is_off_is_worth_a_try(self) -> None:
        facts = {"allreduce_custom_all_reduce": "false"}
        assert "custom all-reduce is off" in only(findings([[with_allreduce(0.0152)]], facts=facts))
        facts = {"allreduce_custom_all_reduce": "true"}
        assert "custom all-reduce is off" not in only(findings([[with_allreduce(0.0152)]], facts=facts))

    def test_by_other_kernels_says_that_the_settings_change_nothing_and_suggests_none(self) -> None:
        text = only(findings([[with_allreduce(0.0, 0.0152)]]))
        assert "60% of verify is all-reduce by custom, NVLS, symmetric-memory or fused kernels (15.20 ms" in text
        assert "NCCL_PROTO and NCCL_ALGO change nothing" in text
        assert "try NCCL" not in text

    def test_by_both_is_about_the_larger_part_and_names_the_other(self) -> None:
        text = only(findings([[with_allreduce(0.010, 0.005)]]))
        assert "try NCCL_PROTO=LL" in text
        assert "Another 20% is custom or fused all-reduce, which these settings do not move" in text
        text = only(findings([[with_allreduce(0.005, 0.010)]]))
        assert "try NCCL" not in text
        assert "NCCL's own all-reduce is 20% of verify" in text

    def test_a_small_one_is_no_finding(self) -> None:
        assert findings([[with_allreduce(0.001, 0.001)]]) == ()
        assert findings([[captured()]]) == ()

    def test_other_collectives_are_no_all_reduce(self) -> None:
        assert findings([[captured({**DENSE, "collective": 0.01})]]) == ()

    def test_in_another_phase_is_no_finding_about_verify(self) -> None:
        one = captured()
        draft = {**one.kernel_seconds, ("draft_steps", "allreduce_nccl"): 1.0}
        assert findings([[replace(one, kernel_seconds=draft)]]) == ()


class TestSlowRank:
    def group(self, least: float, most: float = 0.006) -> list[Captured]:
        others = [captured({**DENSE, "allreduce_nccl": most}, rank=f"tp{rank}") for rank in (0, 1, 3)]
        return [*others, captured({**DENSE, "gemm": 0.0076 + most - least, "allreduce_nccl": least}, rank="tp2")]

    def test_the_rank_with_the_least_all_reduce_is_named(self) -> None:
        found = [text for text in findings([self.group(0.002)]) if "wait for it" in text]
        assert only(tuple(found)).startswith("tp2 spends 2.00 ms of verify in all-reduce and the other ranks 6.00 ms")

    def test_equal_ranks_and_ranks_that_hardly_communicate_are_not(self) -> None:
        for group in (self.group(0.0055), self.group(0.0001, 0.0003), self.group(0.002)[-1:], self.group(0.002)[:2]):
            assert not [text for text in findings([group]) if "wait for it" in text]

    def test_ranks_of_different_groups_are_not_compared(self) -> None:
        group = self.group(0.002)
        assert not [text for text in findings([group[:3], group[3:]]) if "wait for it" in text]


class TestIdle:
    """Kernels of 9.8 ms in a captured verify of 15.8 ms."""

    def test_launches_of_a_server_that_waits_for_its_host_in_ordinary_cycles_too(self) -> None:
        text = only(findings([[captured(idle=0.006)]], ordinary_verify=0.014, host_bound_share=0.8))
        assert (
            "Kernels ran in 9.80 ms of verify, and an ordinary verify takes 14.00 ms or more: 30% of it is idle" in text
        )
        assert "10 captured cycles of tp0, the last 3 min ago" in text
        assert "bound by launches: the GPU waits for the host in 80% of the cycles" in text

    def test_the_profiler_never_makes_more_of_it_than_was_seen_under_it(self) -> None:
        assert "38% of it is idle" in only(findings([[captured(idle=0.006)]], ordinary_verify=0.030))

    def test_without_cuda_graphs_they_are_suggested(self) -> None:
        one = [[captured(idle=0.006)]]
        assert "switch them on" in only(findings(one, ordinary_verify=0.014, config={"cuda_graph": "false"}))
        assert "switch them on" not in only(findings(one, ordinary_verify=0.014, config={"cuda_graph": "true"}))

    @pytest.mark.parametrize("ordinary", [0.0100, 0.0095, None, 0.0])
    def test_what_only_the_profiler_causes_is_no_finding(self, ordinary: float | None) -> None:
        one = [[captured(idle=0.006)]]
        assert findings(one, ordinary_verify=ordinary, host_bound_share=0.9, config={"cuda_graph": "false"}) == ()

    def test_the_gaps_between_the_kernels_of_a_graph_are_no_finding(self) -> None:
        assert findings([[captured(idle=0.001)]], ordinary_verify=0.03, host_bound_share=0.9) == ()

    def test_an_unknown_busy_time_is_not_idle_time(self) -> None:
        assert findings([[replace(captured(idle=0.006), busy_seconds={})]], ordinary_verify=0.03) == ()


def recorded(batch_size: int) -> Captured:
    """Cycles that were traced on an H200, attributed and classified as those of a capture are."""
    trace, cycles, thread = kernel_traces.recorded(batch_size)
    result = document(analyse(trace, cycles, Classifier(), cuda=True, thread=thread), Classifier())
    phases = result["phases"]
    return Captured(
        cycles=result["cycles"],
        ranks=("tp0",),
        kernel_seconds={(phase, name): s for phase, part in phases.items() for name, s in part["classes"].items()},
        busy_seconds={phase: part["busy_seconds"] for phase, part in phases.items()},
        phase_seconds={phase: part["seconds"] for phase, part in phases.items()},
    )


class TestRecordedOnAnH200:
    def test_a_dense_model_with_one_request_gives_no_cause_for_a_finding(self) -> None:
        """Under the profiler verify was idle for 27 %; in the same cycles without it, it took 5.2 ms."""
        one = recorded(1)
        assert one.classes("target_verify")[0][0] == "gemm"
        assert (one.idle_share("target_verify") or 0.0) > kernels.IDLE_SHARE
        assert findings([[one]], mean_context=700.0, ordinary_verify=0.0052) == ()

    def test_with_sixteen_requests_attention_is_what_counts(self) -> None:
        text = only(findings([[recorded(16)]], mean_context=700.0, ordinary_verify=0.0075))
        assert "of verify is attention" in text


class TestTheRest:
    def test_attention_is_named_with_the_context_it_had(self) -> None:
        text = only(findings([[captured({**DENSE, "attention": 0.008})]], mean_context=12345.0))
        assert "48% of verify is attention (8.00 ms of 16.50 ms; 10 captured cycles of tp0" in text
        assert "at a mean context of 12,345 tokens" in text
        assert "mean context" not in only(findings([[captured({**DENSE, "attention": 0.008})]]))
        assert findings([[captured({**DENSE, "attention": 0.003})]], mean_context=12345.0) == ()

    def test_sampling_is_judged_against_the_whole_cycle(self) -> None:
        text = only(findings([[captured(sampling=0.002)]]))
        assert text.startswith("17% of the cycle is sampling (2.00 ms of 12.11 ms; 10 captured cycles of tp0")
        assert findings([[captured(sampling=0.0001)]]) == ()

    def test_kernels_of_no_class_are_told(self) -> None:
        text = only(findings([[captured({**DENSE, "other": 0.001})]]))
        assert "9% of verify is in kernels of the class other" in text

    @property_test
    @given(
        st.dictionaries(st.sampled_from(catalogue.KERNEL_CLASSES), st.floats(0.0, 0.1), max_size=11),
        st.floats(0.0, 0.1),
        st.floats(0.0, 0.1),
    )
    def test_every_finding_states_its_evidence(self, verify: dict[str, float], idle: float, sampling: float) -> None:
        one = captured(verify, idle=idle, sampling=sampling)
        for sentence in findings([[one]], host_bound_share=1.0, mean_context=1e5, ordinary_verify=1.0):
            assert "10 captured cycles of tp0, the last 3 min ago" in sentence
            assert "nan" not in sentence
        if "allreduce_nccl" not in verify:
            assert not any("try NCCL" in sentence for sentence in findings([[one]]))
