"""What one event costs, without SGLang: the GPU's time and the host's, by how it is recorded.

A cycle is three CUDA graphs (draft, verify, draft extend) with small kernels between them, as in SGLang. The ways to
record take turns, the order rotated, so that each is compared with none in the same minute.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from eagle_exporter.timing import cuda_driver
from tests.gpu.figures import bootstrap

CYCLES = 100
ROUNDS = 15
SEVEN = frozenset(range(7))
"""Boundaries: start, draft start, draft end, verify start, verify end, extend start, extend end."""


def run(report: dict[str, Any], save: Callable[[], None]) -> None:
    """Measure all of it."""
    import torch

    cuda = torch.cuda
    stream = cuda.Stream()
    with cuda.stream(stream):
        weight = torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
        small = torch.zeros(4, 4096, device="cuda")
        for _ in range(3):
            x @ weight
        small.add_(1)
        stream.synchronize()

        kept = []  # an event must live as long as the graph that records it

        branch = cuda.Stream()

        def graph(matmuls: int, kernels: int, events: int = 0, *, branched: bool = False) -> tuple[Any, list[Any]]:
            inside = [cuda.Event(enable_timing=True, external=True) for _ in range(events)]
            kept.extend(inside)
            captured = cuda.CUDAGraph()

            def note(event: Any) -> None:
                if branched:
                    branch.wait_stream(stream)
                    event.record(branch)
                else:
                    event.record()

            with cuda.graph(captured, stream=stream):
                if inside:
                    note(inside[0])
                for part in range(max(events - 1, 1)):
                    for _ in range(matmuls // max(events - 1, 1)):
                        x @ weight
                    for _ in range(kernels // max(events - 1, 1)):
                        small.add_(1)
                    if inside:
                        note(inside[part + 1])
                if inside and branched:
                    stream.wait_stream(branch)
            return captured, inside

        draft, _ = graph(2, 24)
        draft_two, two = graph(2, 24, 2)
        draft_three, three = graph(2, 24, 3)
        draft_branch, on_branch = graph(2, 24, 3, branched=True)
        draft_five_branch, _ = graph(4, 24, 5, branched=True)
        draft_five, _ = graph(4, 24, 5)
        draft_zero, _ = graph(4, 24)
        verify, _ = graph(40, 200)
        extend, _ = graph(2, 20)
        events = [cuda.Event(enable_timing=True) for _ in range(7)]
        begin_event, end_event = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        for event in (*events, begin_event, end_event):
            event.record(stream)
        stream.synchronize()

        def cycle(which: frozenset[int], drafted: Any, record: Callable[[int], Any]) -> None:
            def boundary(number: int) -> None:
                if number in which:
                    record(number)

            boundary(0)
            for number, (kernels, replay) in enumerate(((2, drafted.replay), (5, verify.replay), (6, extend.replay))):
                for _ in range(kernels):
                    small.add_(1)
                boundary(2 * number + 1)
                replay()
                boundary(2 * number + 2)
            for _ in range(4):
                small.add_(1)

        def by_torch(index: int) -> None:
            events[index].record(stream)

        none = frozenset[int]()
        ways = {
            "none": (none, draft, by_torch),
            "two": (frozenset((0, 6)), draft, by_torch),
            "five": (SEVEN - {1, 2}, draft, by_torch),
            "seven": (SEVEN, draft, by_torch),
            "two_in_graph": (none, draft_two, by_torch),
            "three_in_graph": (none, draft_three, by_torch),
            "three_on_branch": (none, draft_branch, by_torch),
            "five_on_branch_four_steps": (none, draft_five_branch, by_torch),
            "none#control": (none, draft, by_torch),
            "none_four_steps": (none, draft_zero, by_torch),
            "five_in_graph_four_steps": (none, draft_five, by_torch),
        }

        def compare(ways: Mapping[str, tuple[frozenset[int], Any, Callable[[int], Any]]]) -> dict[str, Any]:
            took: dict[str, list[float]] = defaultdict(list)
            names = list(ways)
            for turn in range(ROUNDS):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    which, drafted, record = ways[name]
                    begin_event.record(stream)
                    for _ in range(CYCLES):
                        cycle(which, drafted, record)
                    end_event.record(stream)
                    end_event.synchronize()
                    took[name].append(begin_event.elapsed_time(end_event) / CYCLES * 1e3)
            found = {}
            for name in names:
                base = took["none_four_steps" if "four_steps" in name else "none"]
                more = [one - none_ for one, none_ in zip(took[name], base, strict=True)]
                found[name] = {
                    "cycle_us": round(statistics.median(took[name]), 2),
                    "more_us": round(statistics.median(more), 2),
                    "ci95": [round(value, 2) for value in bootstrap(more)],
                }
                print("  gpu", name, found[name], flush=True)
            return found

        report["gpu_us_per_cycle"] = compare(ways)
        save()

        # --- does an event inside a graph go with one outside? ---------------------------------------------
        mixed: dict[str, Any] = {}
        for name, drafted, inside in (
            ("two", draft_two, two),
            ("three", draft_three, three),
            ("three on a branch", draft_branch, on_branch),
        ):
            cycle(SEVEN, drafted, by_torch)
            stream.synchronize()
            try:
                mixed[name] = {
                    "start_to_inside_first_us": events[0].elapsed_time(inside[0]) * 1e3,
                    "outside_before_to_inside_first_us": events[1].elapsed_time(inside[0]) * 1e3,
                    "inside_us": inside[0].elapsed_time(inside[-1]) * 1e3,
                    "outside_us": events[1].elapsed_time(events[2]) * 1e3,
                    "inside_last_to_outside_after_us": inside[-1].elapsed_time(events[2]) * 1e3,
                    "start_to_verify_start_us": events[0].elapsed_time(events[3]) * 1e3,
                    "start_to_inside_to_verify_start_us": (
                        events[0].elapsed_time(inside[0]) + inside[0].elapsed_time(events[3])
                    )
                    * 1e3,
                    "query_inside": inside[0].query(),
                }
            except Exception as error:
                mixed[name] = {"error": f"{type(error).__name__}: {error}"}
        report["mixed"] = mixed
        print("  mixed", mixed, flush=True)

        driver = cuda_driver.load()
        if driver is None:
            raise RuntimeError("this machine's CUDA driver lacks what the event clock calls")
        handles = [cuda_driver.handle_of(event) for event in events]
        stream_handle = ctypes.c_void_p(stream.cuda_stream)

        def by_driver(index: int) -> None:
            driver.record(handles[index], stream_handle)

        report["gpu_us_per_cycle_by_driver"] = compare(
            {"none": ways["none"], "seven": ways["seven"], "seven_by_driver": (SEVEN, draft, by_driver)}
        )
        save()

        # --- host ------------------------------------------------------------------------------------------
        junk = [bytearray(1 << 16) for _ in range(96)]  # 6 MiB: more than the second-level cache
        objects: list[dict[str, Any]] = [{"a": i, "b": [i]} for i in range(20000)]

        def churn() -> int:
            total = 0
            for block in junk:
                total += sum(block[::512])
            for one in objects[::7]:
                total += one["a"]
            return total

        class Native:
            __slots__ = ("record",)

            def __init__(self, event: Any) -> None:
                native: Any = super(type(event), event) if len(type(event).__mro__) > 2 else event
                self.record = native.record

        natives = [Native(event) for event in events]
        host_ways: dict[str, Callable[[int], Any]] = {
            "event.record(stream)": by_torch,
            "native record(stream)": lambda index: natives[index].record(stream),
            "driver": by_driver,
            "nothing": lambda _index: None,
        }
        clock = time.perf_counter_ns
        cold: dict[str, list[int]] = defaultdict(list)
        lone: dict[str, list[int]] = defaultdict(list)
        for turn in range(160):
            for name in list(host_ways)[turn % 4 :] + list(host_ways)[: turn % 4]:
                one_way = host_ways[name]
                for index, launch in enumerate(
                    (lambda: small.add_(1), draft.replay, lambda: small.add_(1), verify.replay, extend.replay)
                ):
                    launch()
                    begin = clock()
                    one_way(index)
                    lone[name].append(clock() - begin)
                churn()
                begin = clock()
                one_way(5)
                cold[name].append(clock() - begin)
            if turn % 4 == 3:
                stream.synchronize()
        stream.synchronize()
        report["host_us"] = {
            name: {
                "after_a_launch": round(statistics.median(lone[name]) / 1e3, 2),
                "after_churn": round(statistics.median(cold[name]) / 1e3, 2),
            }
            for name in host_ways
        }

        # Hot loops: record, query and elapsed time.
        def loop(function: Callable[[], Any], times: int = 2000) -> float:
            begin = clock()
            for _ in range(times):
                function()
            return round((clock() - begin) / times / 1e3, 3)

        native_first: Any = super(type(events[0]), events[0])
        report["hot_us"] = {
            "record torch": loop(lambda: events[0].record(stream)),
            "record native": loop(lambda: natives[0].record(stream)),
            "record driver": loop(lambda: driver.record(handles[0], stream_handle)),
        }
        stream.synchronize()
        report["hot_us"] |= {
            "query torch": loop(events[0].query),
            "query native": loop(native_first.query),
            "elapsed torch": loop(lambda: events[1].elapsed_time(events[2])),
            "elapsed native": loop(lambda: native_first.elapsed_time(events[0])),
            "elapsed driver": loop(lambda: driver.between(handles[1], handles[2])),
        }
        report["driver_agrees"] = [driver.between(handles[1], handles[2]), events[1].elapsed_time(events[2])]

        # The first reading of events that are complete, while the GPU has other work.
        readings: dict[str, Callable[[int], Any]] = {
            "elapsed torch": lambda index: events[0].elapsed_time(events[index]),
            "elapsed driver": lambda index: driver.between(handles[0], handles[index]),
        }
        busy: dict[str, list[int]] = defaultdict(list)
        for _ in range(25):
            for name, read in readings.items():
                for event in events:
                    small.add_(1)
                    event.record(stream)
                stream.synchronize()
                for _ in range(200):
                    x @ weight
                begin = clock()
                for index in range(1, len(events)):
                    read(index)
                busy[name].append((clock() - begin) // (len(events) - 1))
                stream.synchronize()
        report["busy_us"] = {name: round(statistics.median(values) / 1e3, 2) for name, values in busy.items()}
        print("  host", report["host_us"], report["hot_us"], report["busy_us"], report["driver_agrees"], flush=True)
        save()
