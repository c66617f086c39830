from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.kernels.classes import Classifier
from eagle_exporter.kernels.trace import Analysis, Cycle, TraceError, analyse, annotated, document
from tests.unit.kernel_traces import RECORDED, kernel, launch, operator, recorded, trace

DRAFT, VERIFY, EXTEND, OVERHEAD, KV, OTHER = range(6)


def analysed(batch_size: int) -> Analysis:
    found, cycles, thread = recorded(batch_size)
    return analyse(found, cycles, Classifier(), cuda=True, thread=thread)


def ms(nanoseconds: float, cycles: int = 3) -> float:
    return nanoseconds / cycles / 1e6


# --- recorded on a GPU -----------------------------------------------------------------------------------
@pytest.mark.parametrize("batch_size", RECORDED)
def test_nothing_is_lost_or_counted_twice(batch_size: int) -> None:
    found, _, _ = recorded(batch_size)
    kernels = [event for event in found["traceEvents"] if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    result = analysed(batch_size)
    total = sum(round(event["dur"] * 1000) for event in kernels)
    assert result.total == total
    assert sum(sum(part.classes.values()) for part in result.phases) + result.outside == total
    assert sum(part.kernels for part in result.phases) + result.outside_kernels == len(kernels)
    assert result.unlaunched == 0
    assert result.problems == []


@pytest.mark.parametrize(("batch_size", "verify", "draft", "extend"), [(1, 4.98, 0.36, 0.26), (16, 7.30, 0.41, 0.34)])
def test_kernels_inside_cuda_graphs_land_in_the_phase_that_launched_the_graph(
    batch_size: int, verify: float, draft: float, extend: float
) -> None:
    """Draft, verify and extend run kernels of the same names; the figures were found by ranges of the profiler."""
    result = analysed(batch_size)
    for phase, expected in ((VERIFY, verify), (DRAFT, draft), (EXTEND, extend)):
        assert ms(sum(result.phases[phase].classes.values())) == pytest.approx(expected, rel=0.03)
    # One verify runs 32 layers, the draft model has one.
    assert result.phases[VERIFY].kernels > 6 * result.phases[DRAFT].kernels


@pytest.mark.parametrize("batch_size", RECORDED)
def test_under_five_percent_of_verify_has_no_class(batch_size: int) -> None:
    result = analysed(batch_size)
    verify = result.phases[VERIFY]
    unclassified = sum(nanoseconds for nanoseconds, _ in result.unclassified.values())
    assert unclassified < 0.05 * sum(verify.classes.values()), f"add patterns for {sorted(result.unclassified)}"
    assert verify.classes["other"] < 0.05 * sum(verify.classes.values()), "nor is much of it 'other'"


@pytest.mark.parametrize(("batch_size", "gemm", "attention", "norm"), [(1, 3.76, 0.78, 0.164), (16, 4.13, 2.72, 0.172)])
def test_the_classes_of_verify_are_what_the_kernels_do(
    batch_size: int, gemm: float, attention: float, norm: float
) -> None:
    verify = analysed(batch_size).phases[VERIFY]
    for name, expected in (("gemm", gemm), ("attention", attention), ("norm", norm)):
        assert ms(verify.classes[name]) == pytest.approx(expected, rel=0.03)
    assert verify.classes["allreduce_nccl"] == verify.classes["allreduce_custom"] == 0


def test_the_gpu_is_busy_in_a_gpu_bound_verify_and_idle_where_the_host_is_late() -> None:
    bound = analysed(16).phases
    assert 0.95 < bound[VERIFY].busy / bound[VERIFY].duration <= 1.0
    late = analysed(1).phases
    assert late[DRAFT].busy < 0.5 * late[DRAFT].duration, "the profiler slowed this host down"


@pytest.mark.parametrize("batch_size", RECORDED)
def test_phases_on_the_gpu_are_disjoint_and_busy_no_longer_than_they_last(batch_size: int) -> None:
    result = analysed(batch_size)
    for boundaries in result.boundaries:
        assert boundaries == sorted(boundaries)
    assert sum(part.duration for part in result.phases) == sum(row[-1] - row[0] for row in result.boundaries)
    for part in result.phases:
        assert 0 <= part.busy <= part.duration


def test_the_trace_for_people_has_the_phases_and_the_class_of_each_kernel() -> None:
    found, cycles, _ = recorded(1)
    classifier = Classifier()
    result = analyse(found, cycles, classifier, cuda=True)
    shown = annotated(found, cycles, result, classifier)["traceEvents"]
    phases = [event for event in shown if event.get("cat") == "eagle_phase"]
    assert len(phases) == 2 * sum(len(cycle.phases) for cycle in cycles), "at launch and on the GPU"
    assert all(
        event["args"]["kernel_class"] in catalogue.KERNEL_CLASSES for event in shown if event.get("cat") == "kernel"
    )
    assert len(shown) > len(found["traceEvents"])


# --- made by hand ----------------------------------------------------------------------------------------
ONE = (Cycle((1_000, 10_000, 30_000, 40_000), (DRAFT, VERIFY, EXTEND)),)


def of(*events: dict[str, Any], cycles: tuple[Cycle, ...] = ONE, cuda: bool = True, **more: Any) -> Analysis:
    return analyse(trace(*events), cycles, Classifier(), cuda=cuda, **more)


def test_a_kernel_belongs_to_the_phase_of_its_launch_wherever_it_runs() -> None:
    result = of(launch(1, 2_000), kernel(1, 35_000, 500), launch(2, 12_000), kernel(2, 36_000, 700))
    assert [sum(part.classes.values()) for part in result.phases[:3]] == [500, 700, 0]


@pytest.mark.parametrize(
    ("moment", "phase"),
    [(999, None), (1_000, DRAFT), (9_999, DRAFT), (10_000, VERIFY), (39_999, EXTEND), (40_000, None)],
)
def test_a_boundary_opens_the_phase_after_it(moment: int, phase: int | None) -> None:
    result = of(launch(1, moment), kernel(1, 50_000, 500))
    found = [index for index, part in enumerate(result.phases) if part.kernels]
    assert found == ([] if phase is None else [phase])
    assert result.outside == (500 if phase is None else 0)


def test_a_kernel_that_was_launched_before_the_trace_is_outside() -> None:
    result = of(kernel(5, 2_000, 300), launch(1, 11_000), kernel(1, 12_000, 100))
    assert (result.outside, result.unlaunched, result.total) == (300, 1, 400)


def test_a_runtime_call_and_the_driver_call_inside_it_are_one_launch() -> None:
    inner = {**launch(1, 10_500), "cat": "cuda_driver", "name": "cuLaunchKernelEx"}
    result = of(launch(1, 9_500), inner, kernel(1, 20_000, 100))
    assert result.phases[DRAFT].kernels == 1


def test_kernels_side_by_side_both_count_and_are_busy_once() -> None:
    result = of(launch(1, 11_000), kernel(1, 12_000, 1_000), launch(2, 11_500), kernel(2, 12_500, 1_000, stream=9))
    assert sum(result.phases[VERIFY].classes.values()) == 2_000
    assert result.phases[VERIFY].busy == 1_500


def test_a_phase_lasts_until_the_work_launched_in_it_is_done() -> None:
    """As an event on the stream would say: the boundary at 10 µs is reached when the draft's kernel ends at 25."""
    result = of(launch(1, 2_000), kernel(1, 5_000, 20_000), launch(2, 11_000), kernel(2, 25_500, 10_000))
    assert result.boundaries == [[1_000, 25_000, 35_500, 40_000]]
    assert [part.duration for part in result.phases[:3]] == [24_000, 10_500, 4_500]
    assert [part.busy for part in result.phases[:3]] == [20_000, 10_000, 0]


def test_a_phase_lasts_until_its_graph_is_done_also_on_streams_of_the_graphs_own() -> None:
    """A graph with branches shows some kernels on other streams; the one it was launched on waits for all."""
    cycle = Cycle((0, 1000, 2000), (DRAFT, VERIFY))
    one = trace(
        launch(1, 0, duration=10),
        kernel(1, 100, 50, stream=7),
        launch(2, 20, duration=10),
        kernel(2, 200, 5000, stream=30),
        kernel(2, 5200, 800, stream=31),
        launch(3, 1000, duration=10),
        kernel(3, 6000, 70, stream=7),
    )
    found = analyse(one, [cycle], Classifier(), cuda=True)
    assert found.boundaries == [[0, 6000, 6070]]


def test_copies_beside_the_forward_stream_move_no_boundary() -> None:
    result = of(launch(1, 2_000), kernel(1, 3_000, 900), launch(2, 2_500), kernel(2, 3_000, 600, stream=9))
    assert result.boundaries[0][1] == 10_000


def test_an_operator_counts_without_its_children() -> None:
    result = of(
        operator("aten::linear", 11_000, 1_000),
        operator("aten::addmm", 11_200, 700),
        operator("aten::copy_", 11_300, 100),
        operator("aten::mm", 11_900, 50, thread=2),
        cuda=False,
    )
    classes = result.phases[VERIFY].classes
    assert (classes["gemm"], classes["memcpy"]) == (300 + 600 + 50, 100)
    assert result.total == 1_050
    assert result.phases[VERIFY].busy == 1_000


SPANS = st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 9_000)), min_size=1, max_size=30)


@given(SPANS)
def test_class_sums_and_what_is_outside_are_the_total_for_any_kernels(spans: list[tuple[int, int]]) -> None:
    events = []
    for number, (start, duration) in enumerate(spans):
        events += [launch(number, start), kernel(number, start + 500, duration, stream=number % 3)]
    result = of(*events)
    assert sum(sum(part.classes.values()) for part in result.phases) + result.outside == sum(d for _, d in spans)
    assert all(0 <= part.busy <= part.duration for part in result.phases)


def test_clocks_that_disagree_are_noticed() -> None:
    across = launch(1, 9_000, duration=2_000)
    result = of(across, kernel(1, 12_000, 100), thread=1)
    assert len(result.problems) == 1
    assert "clocks" in result.problems[0]
    assert len(of(across, kernel(1, 12_000, 100), thread=999).problems) == 1, "a thread by another number"
    other = (launch(2, 3_000, thread=2), kernel(2, 13_000, 100))
    assert of(across, kernel(1, 12_000, 100), *other, thread=2).problems == [], "another thread may"


def test_a_cycle_without_any_launch_is_noticed() -> None:
    later = Cycle((50_000, 60_000), (DRAFT,))
    result = of(launch(1, 2_000), kernel(1, 3_000, 100), cycles=(*ONE, later))
    assert result.problems[0].startswith("1 of 2 cycles launched nothing")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({}, "no traceEvents"),
        ({"traceEvents": []}, "CUPTI"),
        ({"traceEvents": [], "baseTimeNanoseconds": "soon"}, "baseTimeNanoseconds"),
        ({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "args": {}}]}, "no time"),
        ({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": float("inf")}]}, "no time"),
    ],
)
def test_a_trace_that_cannot_be_used_is_an_error_that_says_why(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        analyse(broken, ONE, Classifier(), cuda=True)


def test_without_operators_or_cycles_there_is_no_analysis() -> None:
    with pytest.raises(TraceError, match="operator"):
        of(cuda=False)
    with pytest.raises(TraceError, match="no cycle"):
        of(cycles=())
    with pytest.raises(TraceError, match="overlap"):
        of(cycles=(*ONE, *ONE))


@pytest.mark.parametrize(
    ("marks", "phases"), [((1,), ()), ((1, 2), ()), ((2, 1), (0,)), ((1, 2), (6,)), ((1, 2), (-1,))]
)
def test_boundaries_that_cannot_be_are_refused(marks: tuple[int, ...], phases: tuple[int, ...]) -> None:
    with pytest.raises(TraceError):
        Cycle(marks, phases)


def test_the_result_lists_the_longest_kernels_by_phase_and_those_without_a_class() -> None:
    result = of(
        *(launch(1, 2_000), kernel(1, 3_000, 900, "nvjet_a")),
        *(launch(2, 12_000), kernel(2, 14_000, 800, "nvjet_a")),
        *(launch(3, 13_000), kernel(3, 15_000, 50, "never_seen_before")),
    )
    found = document(result, Classifier())
    assert [(one["phase"], one["seconds"]) for one in found["top"]] == [
        ("draft_steps", 900e-9),
        ("target_verify", 800e-9),
        ("target_verify", 50e-9),
    ]
    assert found["unclassified"] == [{"name": "never_seen_before", "seconds": 50e-9, "count": 1}]
    assert found["phases"]["target_verify"]["classes"] == {"gemm": 800e-9, "other": 50e-9}
