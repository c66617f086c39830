"""Measures the exporter on a real GPU: real SGLang, EAGLE-3, CUDA graphs, a synthetic model with known acceptance.

``run.sh`` sets the environment. Each part starts engines, compares modes within one run (alternating, the order
rotated) and writes OUT/<part>.json; ``summarise.py`` merges the parts into ``results.json``.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import statistics
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import models

PHASES = ("draft_steps", "target_verify", "draft_extend", "verify_overhead", "kv_cache", "other")
MODELS = Path(os.environ.get("MODELS", "/dev/shm/eagle-models"))
REGISTRY = Path("/dev/shm/eagle-gpu-registry")


class Engine:
    """One SGLang engine with the plugin, the switch, and the registry it writes."""

    def __init__(self, name: str, shape: str, *, topk: int = 1, steps: int = 3, draft_tokens: int = 4, **extra: Any):
        self.name = name
        self.switch = Path(f"/tmp/eagle-switch-{name}")
        self.sequence = 0
        os.environ.update(
            EAGLE_GPU_SWITCH=str(self.switch),
            EAGLE_EXPORTER_ENABLED="1",
            EAGLE_EXPORTER_EMBED="0",
            EAGLE_EXPORTER_DIR=str(REGISTRY),
            EAGLE_EXPORTER_SERVER=name,
            SGLANG_PLUGINS="eagle_exporter,eagle_gpu_switch",
        )
        import sglang

        models.build(MODELS / shape, shape)
        begin = time.time()
        self.steps = steps
        self.topk = topk
        self.engine = sglang.Engine(
            model_path=str(MODELS / shape / "target"),
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(MODELS / shape / "draft"),
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=draft_tokens,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_radix_cache=True,
            mem_fraction_static=0.5,
            context_length=8192,
            disable_prefill_cuda_graph=True,
            skip_server_warmup=True,
            log_level="info",
            max_total_tokens=120000,
            random_seed=1,
            disable_custom_all_reduce=True,
            **({"max_running_requests": 16, "cuda_graph_max_bs_decode": 16} | extra),
        )
        self.start_seconds = time.time() - begin
        print(f"[{name}] engine up in {self.start_seconds:.1f} s", flush=True)

    def command(self, **command: Any) -> dict[str, Any]:
        """Let the scheduler obey a command while it is idle, and return its answer."""
        self.sequence += 1
        temporary = self.switch.with_suffix(".tmp")
        temporary.write_text(json.dumps({"sequence": self.sequence, **command}))
        temporary.rename(self.switch)
        done = Path(f"{self.switch}.done")
        deadline = time.time() + 60
        while time.time() < deadline:
            try:
                answer: dict[str, Any] = json.loads(done.read_text())
            except (OSError, ValueError):
                answer = {}
            if answer.get("sequence") == self.sequence:
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer
            time.sleep(0.002)
        raise TimeoutError(f"no answer to {command}")

    def registry(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """All scalar values (and the sums and counts of histograms) of the rank."""
        from eagle_exporter.registry.reader import RegistryReader

        snapshot = RegistryReader(REGISTRY).read()
        rank = next(rank for rank in snapshot.ranks if rank.labels["server"] == self.name)
        values: dict[tuple[str, tuple[str, ...]], float] = {}
        for family in rank.families:
            for series in family.series:
                values[family.name, series.labels] = series.value
                if series.buckets:
                    values[family.name + "_count", series.labels] = sum(series.buckets)
        return values

    def request(self, batch: int, tokens: int) -> dict[str, Any]:
        """Generate, check the tokens, and return tok/s with what the registry gained meanwhile."""
        prompts = [models.prompt(index) for index in range(batch)]
        before = self.registry()
        begin = time.perf_counter()
        outputs = self.engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        )
        wall = time.perf_counter() - begin
        time.sleep(0.05)
        after = self.registry()
        right = all(
            output["output_ids"] == models.expected_tokens(prompt, tokens)
            for prompt, output in zip(prompts, outputs, strict=True)
        )
        meta = [output["meta_info"] for output in outputs]
        return {
            "wall": wall,
            "tok_s": batch * tokens / wall,
            "tokens_right": right,
            "verify_ct": sum(m["spec_verify_ct"] for m in meta),
            "histogram": _sum_lists([_histogram(m) for m in meta]),
            "gained": {key: after[key] - before.get(key, 0.0) for key in after if after[key] != before.get(key, 0.0)},
        }

    def close(self) -> None:
        self.engine.shutdown()


def _histogram(meta: dict[str, Any]) -> list[int]:
    for name in ("spec_correct_drafts_histogram", "spec_accept_histogram"):
        if meta.get(name):
            return list(meta[name])
    return []


def _sum_lists(lists: list[list[int]]) -> list[int]:
    width = max((len(values) for values in lists), default=0)
    return [sum(values[i] for values in lists if i < len(values)) for i in range(width)]


def gain(result: dict[str, Any], name: str, *labels: str) -> float:
    return float(result["gained"].get((name, tuple(labels)), 0.0))


def means(result: dict[str, Any]) -> dict[str, Any]:
    """Mean seconds per timed cycle: device and host by phase, gap, hook cost."""
    timed = sum(value for (name, _), value in result["gained"].items() if name == "eagle_batch_timed_cycles_total")
    if not timed:
        return {"timed": 0}
    cycles = gain(result, "eagle_cycles_total")
    return {
        "timed": timed,
        "cycles": cycles,
        "device": {p: gain(result, "eagle_phase_duration_seconds", p) / timed for p in PHASES},
        "host": {p: gain(result, "eagle_phase_host_seconds_total", p) / timed for p in PHASES},
        "cycle": gain(result, "eagle_cycle_duration_seconds") / timed,
        "gap": gain(result, "eagle_cycle_gap_seconds") / max(gain(result, "eagle_cycle_gap_seconds_count"), 1),
        "host_bound_share": gain(result, "eagle_host_bound_cycles_total") / timed,
        "hook_us_per_cycle": gain(result, "eagle_hook_host_seconds_total") / cycles * 1e6,
        "dropped": {
            labels[0]: value
            for (name, labels), value in result["gained"].items()
            if name == "eagle_cycles_dropped_total"
        },
        "errors": {
            labels[0]: value for (name, labels), value in result["gained"].items() if name == "eagle_hook_errors_total"
        },
        "steps": {
            labels[0]: value / gain(result, "eagle_draft_steps_total", labels[0])
            for (name, labels), value in result["gained"].items()
            if name == "eagle_draft_step_seconds_total"
        },
        "steps_read_share": gain(result, "eagle_draft_steps_total", "1") / timed,
    }


def acceptance(result: dict[str, Any]) -> dict[str, Any]:
    """What the registry counted beside what SGLang returned, and whether they agree."""
    histogram = result["histogram"]
    accepted = sum(i * count for i, count in enumerate(histogram))
    drafts = sum(histogram)
    return {
        "registry_drafts": gain(result, "eagle_drafts_total"),
        "registry_accepted": gain(result, "eagle_accepted_tokens_total"),
        "sglang_drafts": drafts,
        "sglang_accepted": accepted,
        "per_position": [
            gain(result, "eagle_accepted_tokens_per_pos_total", str(i)) for i in range(len(histogram) - 1)
        ],
        "sglang_per_position": [sum(histogram[i + 1 :]) for i in range(len(histogram) - 1)],
        "equal": gain(result, "eagle_drafts_total") == drafts == result["verify_ct"]
        and gain(result, "eagle_accepted_tokens_total") == accepted,
        "tokens_right": result["tokens_right"],
    }


def alternate(
    engine: Engine, modes: list[str], batch: int, tokens: int, repeats: int, deadline: float
) -> dict[str, Any]:
    """Run the modes in turn, the order rotated each time; report ratios to the raw runs next to them."""
    speeds: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)
    last: dict[str, dict[str, Any]] = {}
    wrong = 0
    mode_now = ""
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
    uncounted = ("raw", "device_timer", "off")
    report: dict[str, Any] = {"batch": batch, "tokens": tokens, "wrong_outputs": wrong, "modes": {}}
    reference = speeds[modes[0]]
    for mode in modes:
        pairs = [speed / raw for speed, raw in zip(speeds[mode], reference, strict=False)]
        if not pairs:
            continue
        low, high = _bootstrap(pairs)
        report["modes"][mode] = {
            "tok_s": [round(speed, 2) for speed in speeds[mode]],
            "median_tok_s": round(statistics.median(speeds[mode]), 2),
            "ratio_median": round(statistics.median(pairs), 5),
            "ratio_ci95": [round(low, 5), round(high, 5)],
            "pairs": len(pairs),
            "hook_us_median": round(statistics.median(costs[mode]) * 1e6, 2) if costs[mode] else None,
            "means": means(last[mode]),
            "acceptance": None if mode.partition("#")[0] in uncounted else acceptance(last[mode]),
        }
        entry = report["modes"][mode]
        print(
            f"  batch {batch:2d} {mode:12s} {entry['median_tok_s']:8.1f} tok/s ratio {entry['ratio_median']:.4f} "
            f"[{low:.4f}, {high:.4f}] n={len(pairs)} hook mean "
            f"{entry['means'].get('hook_us_per_cycle', 0):.1f} median {entry['hook_us_median']} us",
            flush=True,
        )
    return report


def _bootstrap(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the median by resampling."""
    import random

    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds) - 1]


def smoke(out: Path, budget: float) -> dict[str, Any]:
    """The small model: does everything work at all?"""
    del budget
    engine = Engine("smoke", "small")
    report: dict[str, Any] = {"start_seconds": engine.start_seconds}
    engine.request(1, 64)
    report["graphs"] = engine.command(mode="on").get("draft_graphs")
    for batch in (1, 4):
        result = engine.request(batch, 300)
        report[f"batch{batch}"] = {"means": means(result), "acceptance": acceptance(result), "tok_s": result["tok_s"]}
    report["parts_us"] = engine.command(parts=True)["parts"]
    engine.command(strict_sync=True)
    result = engine.request(2, 200)
    report["strict_sync"] = {"means": means(result), "acceptance": acceptance(result)}
    print(json.dumps(report, indent=1), flush=True)
    (out / "registry.json").write_text(
        json.dumps({f"{name}{list(labels)}": value for (name, labels), value in engine.registry().items()}, indent=0)
    )
    engine.close()
    return report


def big(out: Path, budget: float) -> dict[str, Any]:
    """Llama-3-8B shape, overlap on: cost, planted faults, recording, truth."""
    begin = time.time()
    engine = Engine("big", "llama3-8b")
    report: dict[str, Any] = {"start_seconds": engine.start_seconds}
    engine.request(1, 200)
    engine.request(16, 100)
    answer = engine.command(mode="on")
    report["graphs"] = answer.get("draft_graphs")
    engine.command(watch_marks=True)
    engine.request(1, 400)
    marks = engine.command(mark_costs=True)["mark_costs"]
    report["mark_us"] = {index: round(statistics.median(values) / 1e3, 2) for index, values in marks.items()}
    print("  marks (us, median, by number)", report["mark_us"], flush=True)
    report["parts_us"] = engine.command(mode="on", parts=True)["parts"]
    # What runs first is what matters most if time runs out.
    report["cost_batch1"] = alternate(engine, ["raw", "on", "raw#control", "auto"], 1, 800, 15, begin + budget * 0.72)
    report["planted"] = planted(engine)
    report["planted_sync"] = planted_sync(engine)
    report["device_timer"] = against_device_timer(engine)
    report["recording"] = record(engine, out)
    report["cost_batch16"] = alternate(engine, ["raw", "on", "raw#control", "auto"], 16, 400, 5, begin + budget * 0.9)
    report["cost_other_modes"] = alternate(
        engine, ["raw", "host", "sync", "device_timer", "off"], 1, 800, 3, begin + budget * 0.98
    )
    # After a profile CUPTI slows every CUDA call of the process, so this comes last.
    report["truth"] = truth(engine, out, 16)
    engine.command(mode="on", strict_sync=True)
    result = engine.request(2, 200)
    report["strict_sync"] = {"means": means(result), "acceptance": acceptance(result)}
    engine.close()
    return report


def variant(name: str, **options: Any) -> Any:
    """Return a part that measures one other configuration."""

    def part(out: Path, budget: float) -> dict[str, Any]:
        del out
        begin = time.time()
        engine = Engine(name, **options)
        report: dict[str, Any] = {"start_seconds": engine.start_seconds}
        engine.request(1, 200)
        engine.command(mode="on")
        engine.request(16, 50)
        report["cost_batch1"] = alternate(engine, ["raw", "on", "auto"], 1, 800, 5, begin + budget * 0.85)
        report["cost_batch16"] = alternate(engine, ["raw", "on", "auto"], 16, 300, 3, begin + budget)
        report["parts_us"] = engine.command(parts=True)["parts"]
        engine.close()
        return report

    return part


def planted(engine: Engine) -> dict[str, Any]:
    """An extra kernel of known length in one phase at a time must show there, at its length, and nowhere else."""
    engine.command(mode="on")
    cycles = 2_000_000
    # What an event pair around nothing reads is no part of the kernel.
    empty = engine.command(calibrate=1)["sleep_seconds"]
    cycles = int(cycles * 0.5e-3 / (engine.command(calibrate=cycles)["sleep_seconds"] - empty))
    length = engine.command(calibrate=cycles)["sleep_seconds"] - empty
    baseline = means(engine.request(1, 300))
    report: dict[str, Any] = {"kernel_seconds": length, "phases": {}}
    for phase in PHASES[:-1]:
        engine.command(plant=phase, plant_cycles=cycles)
        found = means(engine.request(1, 300))
        report["phases"][phase] = {other: found["device"][other] - baseline["device"][other] for other in PHASES}
    engine.command(plant="")
    for phase, row in report["phases"].items():
        shown = " ".join(f"{other}={value * 1e6:+.0f}" for other, value in row.items())
        print(f"  planted {length * 1e6:.0f} us in {phase}: {shown} (us)", flush=True)
    return report


def planted_sync(engine: Engine) -> dict[str, Any]:
    """A synchronisation in the draft's preparation must show as host time, gap and host-bound cycles."""
    engine.command(mode="on")
    without = means(engine.request(1, 300))
    engine.command(plant_sync=True)
    with_sync = means(engine.request(1, 300))
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

    A window in the middle of a request at a large batch, where the GPU stays busy although the profiler slows the host:
    where it does not, an interval between events holds launch latency, which is no part of a kernel span.
    """
    engine.command(mode="on")
    path = str(out / "trace.json")
    engine.command(profile=[70, 14, path])
    engine.request(batch, 400)
    records = engine.command(profiled_records=True)["records"]
    engine.command(mode="on")
    report = compare_with_trace(path, records)
    os.remove(path)
    print("  truth", json.dumps(report), flush=True)
    return report


def compare_with_trace(path: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Attribute kernels to phases by launch correlation id; mean seconds per cycle of span, sum and events."""
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
    for number, phase in enumerate(PHASES):
        chosen = [i for i in range(2, count) if (i, number) in span and "phases" in records[i]]
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
    ours = means(result)
    report = {
        "ours_target_verify_ms": ours["device"]["target_verify"] * 1e3,
        "sglang_ms": {
            name: times[name] / times[name + ".count"] * 1e3 for name in times if not name.endswith(".count")
        },
        "sglang_seconds": times.get("target_verify"),
        "ours_seconds": gain(result, "eagle_phase_duration_seconds", "target_verify"),
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


PARTS = {
    "smoke": smoke,
    "big": big,
    "tree": variant("tree", shape="llama3-8b", topk=4, steps=3, draft_tokens=8),
    "no_overlap": variant("no_overlap", shape="llama3-8b", disable_overlap_schedule=True),
    "small": variant("small", shape="small"),
    "steps5": variant("steps5", shape="llama3-8b", steps=5, draft_tokens=6),
}


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="smoke", help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for all parts")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.parts.split(",")
    end = time.time() + arguments.budget
    failed = 0
    for index, name in enumerate(names):
        begin = time.time()
        try:
            import torch

            weights = {"big": 2.6}
            share = weights.get(name, 1.0) / sum(weights.get(other, 1.0) for other in names[index:])
            report = PARTS[name](arguments.out, (end - begin) * share)
            report["gpu"] = torch.cuda.get_device_name()
            report["torch"] = torch.__version__
            report["seconds"] = time.time() - begin
            (arguments.out / f"{name}.json").write_text(json.dumps(report, indent=1, default=str))
            print(f"[{name}] done in {time.time() - begin:.0f} s", flush=True)
        except Exception:
            traceback.print_exc()
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
