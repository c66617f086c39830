"""Measures the exporter on a real GPU: real SGLang, EAGLE-3, CUDA graphs, a synthetic model with known acceptance.

``run.sh`` sets the environment. Each part starts engines, compares modes within one run (alternating, the order
rotated) and writes OUT/<part>.json; ``summarise.py`` merges the parts into ``results.json``. README.md says what the
parts are and what time they need.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import driver, tensor_parallel
from tests.gpu import events as single_events
from tests.gpu import kernels as captures
from tests.gpu.driver import Engine
from tests.gpu.figures import PHASES, UNCOUNTED, acceptance, bootstrap, gain, means, write


def means_of(result: dict[str, Any]) -> dict[str, Any]:
    """Means per timed cycle of the recording rank."""
    return means(result["gained"])


def answer_acceptance(result: dict[str, Any]) -> dict[str, Any]:
    """Acceptance of the recording rank beside SGLang's own word."""
    judged = acceptance(result["gained"], result["histogram"], result["verify_ct"])
    return {**judged, "tokens_right": result["tokens_right"]}


def alternate(
    engine: Engine, modes: list[str], batch: int, tokens: int, repeats: int, deadline: float
) -> dict[str, Any]:
    """Run the modes in turn, the order rotated each time; report ratios to the raw runs next to them."""
    speeds: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)
    last: dict[str, dict[str, Any]] = {}
    wrong = 0
    mode_now = ""
    if "auto" in modes:
        # It finds its sampling in the first cycles, and keeps it from one switch to the next.
        engine.command(mode="auto")
        engine.request(batch, tokens)
        mode_now = "auto"
    for repeat in range(repeats):
        shift = repeat % len(modes)
        for mode in modes[shift:] + modes[:shift]:
            if time.time() > deadline:
                break
            if mode.partition("#")[0] != mode_now:
                mode_now = mode.partition("#")[0]
                engine.command(mode=mode_now)
            engine.command(costs=True)
            result = engine.request(batch, tokens)
            costs[mode] += engine.command(costs=True)["costs"]
            wrong += not result["tokens_right"]
            speeds[mode].append(result["tok_s"])
            last[mode] = result
    report: dict[str, Any] = {"batch": batch, "tokens": tokens, "wrong_outputs": wrong, "modes": {}}
    reference = speeds[modes[0]]
    for mode in modes:
        pairs = [speed / raw for speed, raw in zip(speeds[mode], reference, strict=False)]
        if not pairs:
            continue
        low, high = bootstrap(pairs)
        report["modes"][mode] = {
            "tok_s": [round(speed, 2) for speed in speeds[mode]],
            "median_tok_s": round(statistics.median(speeds[mode]), 2),
            "ratio_median": round(statistics.median(pairs), 5),
            "ratio_ci95": [round(low, 5), round(high, 5)],
            "pairs": len(pairs),
            "hook_us_median": round(statistics.median(costs[mode]) * 1e6, 2) if costs[mode] else None,
            "means": means(last[mode]["gained"]),
            "acceptance": None if mode.partition("#")[0] in UNCOUNTED else answer_acceptance(last[mode]),
        }
        entry = report["modes"][mode]
        print(
            f"  batch {batch:2d} {mode:12s} {entry['median_tok_s']:8.1f} tok/s ratio {entry['ratio_median']:.4f} "
            f"[{low:.4f}, {high:.4f}] n={len(pairs)} hook mean "
            f"{entry['means'].get('hook_us_per_cycle', 0):.1f} median {entry['hook_us_median']} us",
            flush=True,
        )
    return report


class Part:
    """Figures of one part, written after every step; a step that fails costs the others nothing."""

    def __init__(self, out: Path, name: str, engine: Engine) -> None:
        self._path = out / f"{name}.json"
        self._begin = time.time()
        self.report: dict[str, Any] = {"start_seconds": engine.start_seconds, "steps": {}}

    def take(self, name: str, do: Callable[..., Any], *arguments: Any) -> None:
        """Take one step; its figures, or why there are none, go into the report."""
        started = time.time()
        outcome: dict[str, Any] = {}
        try:
            self.report[name] = do(*arguments)
        except Exception as error:
            traceback.print_exc()
            outcome["error"] = f"{type(error).__name__}: {error}"[:2000]
        self.report["steps"][name] = {"seconds": round(time.time() - started, 1), **outcome}
        write(self._path, {**self.report, **stamp(), "seconds": time.time() - self._begin})


def served(engine: Engine, batch: int, tokens: int) -> dict[str, Any]:
    """Figures of one request."""
    result = engine.request(batch, tokens)
    return {
        "means": means(result["gained"]),
        "acceptance": answer_acceptance(result),
        "tok_s": result["tok_s"],
    }


def strict_sync(engine: Engine) -> dict[str, Any]:
    """No hook synchronises: the registry's own errors would tell."""
    engine.command(mode="on", strict_sync=True)
    return served(engine, 2, 200)


def smoke(out: Path, budget: float) -> dict[str, Any]:
    """The small model: does everything work at all?"""
    del budget
    engine = Engine("smoke", "small")
    part = Part(out, "smoke", engine)
    report = part.report
    engine.request(1, 64)
    report["graphs"] = engine.command(mode="on").get("draft_graphs")
    for batch in (1, 4):
        part.take(f"batch{batch}", served, engine, batch, 300)
    part.take("parts_us", lambda: engine.command(parts=True)["parts"])
    part.take("in_place", in_place, engine)
    part.take("strict_sync", strict_sync, engine)
    print(json.dumps(report, indent=1), flush=True)
    (out / "registry.json").write_text(
        json.dumps({f"{name}{list(labels)}": value for (name, labels), value in engine.registry()[0].items()}, indent=0)
    )
    engine.close()
    return report


def big(out: Path, budget: float) -> dict[str, Any]:
    """Llama-3-8B shape, overlap on: cost, planted faults, recording, truth."""
    begin = time.time()
    engine = Engine("big", "llama3-8b")
    part = Part(out, "big", engine)
    engine.request(1, 200)
    engine.request(16, 100)
    part.report["graphs"] = engine.command(mode="on").get("draft_graphs")
    part.take("mark_us", mark_costs, engine)
    part.take("parts_us", lambda: engine.command(mode="on", parts=True)["parts"])
    compared = ["raw", "on", "raw#control", "auto"]
    others = ["raw", "host", "sync", "device_timer", "off"]
    # What runs first is what matters most if time runs out.
    part.take("cost_batch1", alternate, engine, compared, 1, 800, 15, begin + budget * 0.7)
    part.take("in_place", in_place, engine)
    part.take("planted", planted, engine)
    part.take("planted_sync", planted_sync, engine)
    part.take("device_timer", against_device_timer, engine)
    part.take("recording", record, engine, out)
    part.take("cost_batch16", alternate, engine, compared, 16, 400, 5, begin + budget * 0.9)
    part.take("cost_other_modes", alternate, engine, others, 1, 800, 3, begin + budget * 0.98)
    # After a profile CUPTI slows every CUDA call of the process, so this comes last.
    part.take("truth", truth, engine, out, 16)
    part.take("strict_sync", strict_sync, engine)
    engine.close()
    return part.report


def mark_costs(engine: Engine) -> dict[str, float]:
    """Microseconds of each mark where it happens, by its number."""
    engine.command(watch_marks=True)
    engine.request(1, 400)
    marks = engine.command(mark_costs=True)["mark_costs"]
    report = {index: round(statistics.median(values) / 1e3, 2) for index, values in marks.items()}
    print("  marks (us, median, by number)", report, flush=True)
    return report


def variant(name: str, **options: Any) -> Any:
    """Return a part that measures one other configuration."""

    def measure(out: Path, budget: float) -> dict[str, Any]:
        begin = time.time()
        engine = Engine(name, **options)
        part = Part(out, name, engine)
        engine.request(1, 200)
        engine.command(mode="on")
        engine.request(16, 50)
        compared = ["raw", "on", "auto"]
        part.take("cost_batch1", alternate, engine, compared, 1, 800, 5, begin + budget * 0.85)
        part.take("cost_batch16", alternate, engine, compared, 16, 300, 3, begin + budget)
        part.take("parts_us", lambda: engine.command(parts=True)["parts"])
        engine.close()
        return part.report

    return measure


def in_place(engine: Engine, batches: tuple[int, ...] = (1, 16)) -> dict[str, Any]:
    """Microseconds and calls per cycle of each part of the hooks' work, where it happens, every cycle timed.

    The watching costs something itself, most where calls are many: half a microsecond each.
    """
    engine.command(mode="on", watch_parts=True)
    report = {}
    for batch in batches:
        engine.command(part_costs=True)
        engine.request(batch, 400)
        report[f"batch{batch}"] = engine.command(part_costs=True)["part_costs"]
        print(f"  in place, batch {batch}", json.dumps(report[f"batch{batch}"]), flush=True)
    engine.command(mode="on")
    return report


def typical_phases(engine: Engine) -> dict[str, float]:
    """Median seconds of each phase in one request; a single stall of the host shifts means by more than is sought."""
    engine.command(record=True)
    engine.request(1, 300)
    cycles = [record for record in engine.command(take_records=True)["records"] if "phases" in record]
    return {phase: statistics.median(cycle["phases"][i] for cycle in cycles) for i, phase in enumerate(PHASES)}


def planted(engine: Engine) -> dict[str, Any]:
    """An extra kernel of known length in one phase at a time must show there, at its length, and nowhere else."""
    engine.command(mode="on")
    cycles = 2_000_000
    # What an event pair around nothing reads is no part of the kernel.
    empty = engine.command(calibrate=1)["sleep_seconds"]
    cycles = int(cycles * 0.5e-3 / (engine.command(calibrate=cycles)["sleep_seconds"] - empty))
    length = engine.command(calibrate=cycles)["sleep_seconds"] - empty
    baseline = typical_phases(engine)
    report: dict[str, Any] = {"kernel_seconds": length, "phases": {}}
    for phase in PHASES[:-1]:
        engine.command(plant=phase, plant_cycles=cycles)
        found = typical_phases(engine)
        report["phases"][phase] = {other: found[other] - baseline[other] for other in PHASES}
    engine.command(plant="")
    for phase, row in report["phases"].items():
        shown = " ".join(f"{other}={value * 1e6:+.0f}" for other, value in row.items())
        print(f"  planted {length * 1e6:.0f} us in {phase}: {shown} (us)", flush=True)
    return report


def planted_sync(engine: Engine) -> dict[str, Any]:
    """A synchronisation in the draft's preparation must show as host time, gap and host-bound cycles."""
    engine.command(mode="on")
    without = means_of(engine.request(1, 300))
    engine.command(plant_sync=True)
    with_sync = means_of(engine.request(1, 300))
    engine.command(plant_sync=False)
    report = {"without": without, "with": with_sync}
    for name, row in report.items():
        print(
            f"  sync {name}: host kv_cache {row['host']['kv_cache'] * 1e3:.3f} ms gap {row['gap'] * 1e6:.0f} us "
            f"host-bound {row['host_bound_share']:.2f} cycle {row['cycle'] * 1e3:.2f} ms",
            flush=True,
        )
    return report


def truth(engine: Engine, out: Path, batch: int) -> dict[str, Any]:
    """Device times against the profiler's kernel spans, in the same cycles.

    A window in the middle of a request at a large batch, where the GPU stays mostly busy although the profiler slows
    the host; `compare_with_trace` leaves out the cycles in which it does not.
    """
    engine.command(mode="on")
    path = str(out / "trace.json")
    engine.command(profile=[70, 24, path])
    engine.request(batch, 400)
    records = engine.command(profiled_records=True)["records"]
    engine.command(mode="on")
    report = compare_with_trace(path, records)
    os.remove(path)
    print("  truth", json.dumps(report), flush=True)
    return report


def compare_with_trace(path: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Attribute kernels to phases by launch correlation id; mean seconds per cycle of span, sum and events.

    Where the device waits for the host an interval between events holds launch latency, which is no part of a kernel
    span: only the other cycles are compared, where there are enough of them.
    """
    events = json.loads(Path(path).read_text())["traceEvents"]
    ranges: list[tuple[float, float, int, int]] = []
    launches: dict[int, float] = {}
    kernels: list[tuple[int, float, float]] = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and str(event["name"]).startswith("eagle:"):
            _, cycle, phase = event["name"].split(":")
            ranges.append((event["ts"], event["ts"] + event["dur"], int(cycle), int(phase)))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append((event["args"].get("correlation", -1), event["ts"], event["ts"] + event["dur"]))
    ranges.sort()
    starts = [r[0] for r in ranges]
    span: dict[tuple[int, int], list[float]] = {}
    lost = 0
    for correlation, first, last in kernels:
        launched = launches.get(correlation)
        if launched is None:
            lost += 1
            continue
        index = bisect.bisect_right(starts, launched) - 1
        if index < 0 or launched > ranges[index][1]:
            continue
        key = (ranges[index][2], ranges[index][3])
        entry = span.setdefault(key, [first, last, 0.0])
        entry[0], entry[1] = min(entry[0], first), max(entry[1], last)
        entry[2] += last - first
    count = min(len(records), max((key[0] for key in span), default=-1) + 1)
    busy = sum(entry[2] for entry in span.values())
    whole = max(entry[1] for entry in span.values()) - min(entry[0] for entry in span.values())
    report: dict[str, Any] = {
        "cycles": count,
        "kernels": len(kernels),
        "without_launch": lost,
        "gpu_busy_share": round(busy / whole, 4),
        "host_bound_cycles": sum(bool(record.get("host_bound")) for record in records),
        "phases": {},
    }
    usable = [i for i in range(2, count) if "phases" in records[i]]
    busy_cycles = [i for i in usable if records[i].get("host_bound") is False]
    report["all_cycles"] = len(busy_cycles) < LEAST_BUSY_CYCLES
    compared = usable if report["all_cycles"] else busy_cycles
    report["host_bound_left_out"] = len(usable) - len(compared)
    for number, phase in enumerate(PHASES):
        chosen = [i for i in compared if (i, number) in span]
        if not chosen:
            continue
        event_s = statistics.fmean(records[i]["phases"][number] for i in chosen)
        span_s = statistics.fmean(span[i, number][1] - span[i, number][0] for i in chosen) * 1e-6
        sum_s = statistics.fmean(span[i, number][2] for i in chosen) * 1e-6
        report["phases"][phase] = {
            "event_us": round(event_s * 1e6, 2),
            "span_us": round(span_s * 1e6, 2),
            "kernel_sum_us": round(sum_s * 1e6, 2),
            "error_ratio": round(event_s / span_s - 1, 5),
            "error_us": round((event_s - span_s) * 1e6, 2),
            "bubbles_us": round((event_s - sum_s) * 1e6, 2),
            "cycles": len(chosen),
        }
    return report


def against_device_timer(engine: Engine) -> dict[str, Any]:
    """SGLang's own device timer beside ours, on the same cycles."""
    engine.command(mode="on+device_timer")
    engine.command(device_times=True)
    result = engine.request(1, 400)
    times = engine.command(device_times=True)["device_times"]
    engine.command(mode="on")
    ours = means(result["gained"])
    report = {
        "ours_target_verify_ms": ours["device"]["target_verify"] * 1e3,
        "sglang_ms": {
            name: times[name] / times[name + ".count"] * 1e3 for name in times if not name.endswith(".count")
        },
        "sglang_seconds": times.get("target_verify"),
        "ours_seconds": gain(result["gained"], "eagle_phase_duration_seconds", "target_verify"),
    }
    if report["sglang_seconds"]:
        report["ratio"] = report["ours_seconds"] / report["sglang_seconds"]
    print("  device timer", json.dumps(report), flush=True)
    return report


def record(engine: Engine, out: Path) -> dict[str, Any]:
    """Record real cycles at batch sizes 1 to 16 for the replay."""
    engine.command(mode="on")
    groups = []
    for batch, tokens in ((1, 500), (2, 250), (4, 200), (8, 200), (16, 200)):
        engine.command(record=True)
        engine.request(batch, tokens)
        groups.append({"batch": batch, "cycles": engine.command(take_records=True)["records"]})
    (out / "recording.json").write_text(json.dumps(groups))
    return {"cycles": {group["batch"]: len(group["cycles"]) for group in groups}}


def tp(out: Path, budget: float, *, gpus: int = 0, without_gpu: bool = False) -> dict[str, Any]:
    """Several GPUs; writes its figures after every step."""
    import torch

    platform = driver.cpu() if without_gpu else driver.CUDA
    ranks = gpus or (2 if without_gpu else torch.cuda.device_count())
    if ranks < 2:
        raise SystemExit(f"the part tp needs two GPUs or more, and there is {torch.cuda.device_count()}")
    report: dict[str, Any] = {} if without_gpu else stamp()
    path = out / f"tp{ranks}.json"
    begin = time.time()

    def save() -> None:
        write(path, {**report, "seconds": time.time() - begin})

    def start(name: str, environment: dict[str, str]) -> Engine:
        return Engine(name, "llama3-8b", ranks=ranks, platform=platform, environment=environment)

    plan = tensor_parallel.TRIAL if without_gpu else tensor_parallel.FULL
    tensor_parallel.run(start, out, budget, report, save, plan=plan)
    keep_traces(out, "tp")
    failed = [name for name, step in report["steps"].items() if "error" in step]
    print(f"[tp] {path}; steps that failed or were not run: {', '.join(failed) or 'none'}", flush=True)
    return report


def kernels(out: Path, budget: float, *, without_gpu: bool = False) -> dict[str, Any]:
    """Kernel captures: what they add up to, and what they cost; writes its figures after every step."""
    platform = driver.cpu() if without_gpu else driver.CUDA
    report: dict[str, Any] = {} if without_gpu else stamp()
    begin = time.time()

    def save() -> None:
        write(out / "kernels.json", {**report, "seconds": time.time() - begin})

    engine = Engine("kernels", "llama3-8b", platform=platform)
    report["start_seconds"] = engine.start_seconds
    batches = {2: 120} if without_gpu else {1: 800, 16: 400}
    for batch in batches:
        engine.request(batch, 40 if without_gpu else 200)
    captures.run(
        engine,
        driver.REGISTRY,
        report,
        save,
        deadline=begin + budget * 0.9,
        batches=batches,
        rounds=1 if without_gpu else 4,
    )
    keep_traces(out, "kernels")
    engine.close()
    if not without_gpu and time.time() < begin + budget - HOST_BOUND_SECONDS:
        bound = Engine("kernels_small", "small")
        report["host_bound"] = {"start_seconds": bound.start_seconds}
        bound.request(1, 200)
        captures.host_bound(bound, driver.REGISTRY, report["host_bound"], save, tokens=800, deadline=begin + budget)
        report["steps"] |= {f"host_bound_{name}": step for name, step in report["host_bound"].pop("steps").items()}
        save()
        bound.close()
    return report


def keep_traces(out: Path, server: str) -> None:
    """Copy the traces that captures of a server have left."""
    for path in driver.REGISTRY.glob(f"{server}/captures/*.trace.json.gz"):
        shutil.copy(path, out / f"{server}-{path.name}")


def events(out: Path, budget: float) -> dict[str, Any]:
    """What one event costs the GPU and the host, without SGLang."""
    del budget
    report: dict[str, Any] = stamp()
    single_events.run(report, lambda: write(out / "events.json", report))
    return report


def stamp() -> dict[str, Any]:
    """Where figures come from; `summarise.py` takes nothing without it."""
    import torch

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


PARTS = {
    "events": events,
    "smoke": smoke,
    "big": big,
    "tree": variant("tree", shape="llama3-8b", topk=4, steps=3, draft_tokens=8),
    "no_overlap": variant("no_overlap", shape="llama3-8b", disable_overlap_schedule=True),
    "small": variant("small", shape="small"),
    "steps5": variant("steps5", shape="llama3-8b", steps=5, draft_tokens=6),
    "tp": tp,
    "kernels": kernels,
}
LEAST_BUSY_CYCLES = 4
"""So many cycles in which the device never waited for the host are enough to compare no others with a trace."""
HOST_BOUND_SECONDS = 90.0
"""What captures of the model that is bound by the host take, the start of its engine included."""
WEIGHTS = {"big": 2.6}
"""Parts that get more than one share of the budget."""


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="smoke", help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for all parts")
    parser.add_argument("--gpus", type=int, default=0, help="ranks of the part tp (default: all GPUs of the machine)")
    parser.add_argument(
        "--without-gpu",
        action="store_true",
        help="try the flow of a part (tp, kernels) on the CPU; what it writes is no figure",
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.parts.split(",")
    end = time.time() + arguments.budget
    failed = 0
    for index, name in enumerate(names):
        begin = time.time()
        share = WEIGHTS.get(name, 1.0) / sum(WEIGHTS.get(other, 1.0) for other in names[index:])
        part: Callable[..., dict[str, Any]] = PARTS[name]
        if name == "kernels":
            part = partial(kernels, without_gpu=arguments.without_gpu)
        if name == "tp":
            part = partial(tp, gpus=arguments.gpus, without_gpu=arguments.without_gpu)
        try:
            report = part(arguments.out, (end - begin) * share)
            if name not in ("tp", "kernels"):
                write(arguments.out / f"{name}.json", {**report, **stamp(), "seconds": time.time() - begin})
            print(f"[{name}] done in {time.time() - begin:.0f} s", flush=True)
            failed += any("error" in step for step in report.get("steps", {}).values())
        except Exception:
            traceback.print_exc()
            failed += 1
        finally:
            driver.close_all()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
