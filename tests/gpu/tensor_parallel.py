"""The part ``tp``: one engine over several GPUs of one host, and what the exporter says of each rank.

Custom all-reduce is switched off (SGLang's own kernel would make NCCL's settings irrelevant), and NVLink multicast too.
Every step adds to the report and writes it, so a run that is cut keeps what it has. In this order:

    identity    one registry file per rank, one card per rank, known by the uuid that nvidia-smi shows
    acceptance  counted once, as SGLang's ``meta_info`` has it; phases by rank
    planted     a slow host, an extra kernel before a collective and one after the last, on one rank at a time: what
                every rank shows of it
    cost        tok/s with the plugin over without, in interleaved pairs; all ranks are switched together
    recording   cycles of all ranks for the replay
    kernels     time in NCCL's kernels by rank, with and without the extra kernel before the collective
    nccl        other protocols and algorithms, one engine each: verify's mean and percentiles by setting

The large batch is compared after the recording: of the two it is the one that a run can do without.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.gpu import figures
from tests.gpu.figures import PHASES

NCCL_SETTINGS: tuple[dict[str, str], ...] = (
    {"NCCL_PROTO": "Simple"},
    {"NCCL_ALGO": "ring,tree;allreduce:tree"},
    {"NCCL_PROTO": "LL"},
)
"""What is tried beside NCCL's own choice, the most telling first: a message of a decode step is small (32 kB at
batch size 1), where the simple protocol's latency shows. ``Tree`` alone would leave the gathering of the logits
without an algorithm, and NCCL would refuse it."""
KERNEL_SECONDS = 0.5e-3
"""Length of a planted kernel."""
SLEEP_SECONDS = 8e-3
"""How long a planted host sleep lasts: more than the slack that the overlap scheduler leaves."""
PERCENTILES = (0.5, 0.9, 0.99)
COMPARED = ("raw", "on", "raw#control", "auto")


class Server(Protocol):
    """What the steps need of `driver.Engine`."""

    name: str
    ranks: int
    start_seconds: float

    def command(self, **command: Any) -> dict[str, Any]: ...

    def request(self, batch: int, tokens: int) -> dict[str, Any]: ...

    def snapshots(self) -> list[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How much is done: the figures need more than a trial of the flow.

    Attributes:
        pairs: Interleaved pairs, and tokens of each request, by batch size.
        acceptance: Batch sizes and tokens of the requests whose acceptance is compared.
        planted_tokens: Tokens of a request with a planted fault.
        recording: Batch sizes and tokens of the recorded bursts.
        nccl: Settings that are tried.
        nccl_requests: Batch sizes and tokens of the requests in each setting.
        kernel_cycles: Cycles of a kernel capture.
    """

    pairs: Mapping[int, tuple[int, int]] = field(default_factory=lambda: {1: (15, 600), 16: (5, 300)})
    acceptance: tuple[tuple[int, int], ...] = ((1, 300), (4, 300))
    planted_tokens: int = 300
    recording: tuple[tuple[int, int], ...] = ((1, 500), (2, 250), (4, 200), (8, 200), (16, 200))
    nccl: tuple[dict[str, str], ...] = NCCL_SETTINGS
    nccl_requests: tuple[tuple[int, int], ...] = ((1, 600), (16, 300))
    kernel_cycles: int = 10


FULL = Plan()
TRIAL = Plan(
    pairs={1: (2, 16), 4: (1, 8)},
    acceptance=((1, 16),),
    planted_tokens=16,
    recording=((1, 16), (2, 8)),
    nccl=({"NCCL_PROTO": "Simple"},),
    nccl_requests=((1, 16),),
    kernel_cycles=2,
)
"""Enough to see that every step runs."""


def run(
    start: Callable[..., Server],
    out: Path,
    budget: float,
    report: dict[str, Any],
    save: Callable[[], None],
    *,
    plan: Plan = FULL,
) -> None:
    """Do all steps that the budget allows.

    Args:
        start: ``start(name, environment)`` starts an engine over all ranks.
        out: Where the recording goes.
        budget: Seconds for everything.
        report: Filled step by step.
        save: Writes it.
        plan: How much is done.
    """
    begin = time.time()

    def left() -> float:
        return begin + budget - time.time()

    engine = start("tp", {})
    report |= {"ranks": engine.ranks, "start_seconds": engine.start_seconds, "steps": {}}
    save()

    def step(name: str, do: Callable[[], Any], shown: str = "") -> None:
        """Run one step, `shown` under another name; one that fails costs the others nothing."""
        started = time.time()
        try:
            report[name] = do()
            outcome: dict[str, Any] = {"seconds": round(time.time() - started, 1)}
        except Exception as error:
            outcome = {"seconds": round(time.time() - started, 1), "error": f"{type(error).__name__}: {error}"[:2000]}
        report["steps"][shown or name] = outcome
        print(f"  [{shown or name}] {outcome}", flush=True)
        save()

    try:
        engine.request(1, plan.planted_tokens)
        engine.request(max(plan.pairs), max(8, plan.planted_tokens // 3))
        engine.command(mode="on")
        step("identity", lambda: identity(engine))
        step("acceptance", lambda: acceptance(engine, plan.acceptance))
        step("planted", lambda: planted(engine, plan.planted_tokens))
        step("nccl", lambda: {"default": nccl_figures(engine, plan.nccl_requests)})
        for number, (batch, (pairs, tokens)) in enumerate(plan.pairs.items()):
            name = f"cost_batch{batch}"

            def checkpoint(table: dict[str, Any], name: str = name) -> None:
                report[name] = table
                save()

            # The settings of NCCL come last, each with a start of its own: time is kept for two of them. A later start
            # takes half of the first one's, in which kernels are compiled.
            kept = min(len(plan.nccl), 2) * (min(engine.start_seconds, 45.0) + 8) + 30
            deadline = time.time() + max(left() - kept, 5.0)
            step(
                name,
                partial(alternate, engine, COMPARED, batch, tokens, pairs, deadline, checkpoint),
            )
            if number == 0:
                step("recording", lambda: record(engine, out / f"recording_tp{engine.ranks}.json.gz", plan.recording))
        # A profile slows every CUDA call of the process from then on, so it comes after all times of this engine.
        step("kernels", lambda: kernels(engine, plan.planted_tokens, plan.kernel_cycles))
    finally:
        engine.close()
    started_in = min(engine.start_seconds, 60.0)
    for number, setting in enumerate(plan.nccl, 1):
        name = " ".join(f"{variable}={value}" for variable, value in setting.items())
        if left() < started_in + 8:
            report["steps"][name] = {"error": f"not run: {left():.0f} s left"}
            save()
            continue

        def try_setting(
            name: str = name, setting: dict[str, str] = setting, server: str = f"tp-nccl{number}"
        ) -> dict[str, Any]:
            nonlocal started_in
            other = start(server, setting)
            started_in = other.start_seconds
            try:
                other.request(1, plan.planted_tokens)
                other.command(mode="on")
                return {**report.get("nccl", {}), name: nccl_figures(other, plan.nccl_requests)}
            finally:
                other.close()

        step("nccl", try_setting, name)
    report["nccl_judged"] = judge_nccl(report.get("nccl") or {})
    save()


# --- who is who --------------------------------------------------------------------------------------------
def cards() -> dict[str, dict[str, str]] | None:
    """Return uuid -> index and PCI id as nvidia-smi shows them (the DCGM exporter's labels too), None without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid,index,pci.bus_id", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return {uuid: {"index": index, "pci_bus_id": bus} for uuid, index, bus in rows}


def identity(engine: Server) -> dict[str, Any]:
    """Return who the ranks are."""
    return judge_identity(engine.snapshots(), engine.ranks, cards())


def info(rank: Any, name: str) -> dict[str, str]:
    """Return the labels of an info family of a snapshot, nothing where it has none."""
    family = rank.family(name)
    if family is None or not family.series:
        return {}
    return dict(zip(family.labels, family.series[0].labels, strict=True))


def judge_identity(
    snapshots: Sequence[Any], ranks: int, known: Mapping[str, Mapping[str, str]] | None
) -> dict[str, Any]:
    """Return whether there is one file per rank, and whether each rank's card can be joined by its uuid.

    Args:
        snapshots: Of the server's ranks.
        ranks: How many there must be.
        known: What nvidia-smi shows, see `cards`; None without it.
    """
    numbers = [rank.labels["tp_rank"] for rank in snapshots]
    gpus = {rank.labels["tp_rank"]: info(rank, "eagle_gpu_info") for rank in snapshots}
    uuids = [gpu.get("uuid", "") for gpu in gpus.values()]
    counting = [rank.labels["tp_rank"] for rank in snapshots if rank.family("eagle_drafts_total") is not None]
    joinable = None
    if known is not None:
        joinable = all(
            uuid in known and known[uuid]["pci_bus_id"].lower() == gpu.get("pci_bus_id", "").lower()
            for uuid, gpu in zip(uuids, gpus.values(), strict=True)
        )
    return {
        "files": [rank.path.name for rank in snapshots],
        "one_file_per_rank": numbers == [str(number) for number in range(ranks)]
        and len({rank.path.name for rank in snapshots}) == ranks,
        "acceptance_on": counting,
        "gpu": gpus,
        "uuids_distinct": len(set(uuids)) == ranks and "" not in uuids,
        "joinable": joinable,
        "allreduce": {rank.labels["tp_rank"]: info(rank, "eagle_allreduce_config_info") for rank in snapshots[:1]},
        "nccl": {rank.labels["tp_rank"]: info(rank, "eagle_nccl_config_info") for rank in snapshots},
    }


def acceptance(engine: Server, requests: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return acceptance beside SGLang's word, and the phases of each rank."""
    report: dict[str, Any] = {}
    for batch, tokens in requests:
        result = engine.request(batch, tokens)
        by_rank = [figures.rank_means(gained) for gained in result["gained_by_rank"]]
        counted = [any(name == "eagle_drafts_total" for name, _ in gained) for gained in result["gained_by_rank"]]
        report[f"batch{batch}"] = {
            "acceptance": {
                **figures.acceptance(result["gained"], result["histogram"], result["verify_ct"]),
                "tokens_right": result["tokens_right"],
            },
            "counted_once": counted == [True] + [False] * (engine.ranks - 1),
            "same_cycles": len({rank["cycles"] for rank in by_rank}) == 1,
            "by_rank": by_rank,
        }
        print(f"  batch {batch}: phases by rank (us per cycle)", flush=True)
        print_table(by_rank)
    return report


def print_table(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Print device and host time by phase, gap and host-bound share of each rank."""
    for number, rank in enumerate(by_rank):
        device = " ".join(f"{p}={rank['device'][p] * 1e6:.0f}" for p in PHASES)
        host = " ".join(f"{p}={rank['host'][p] * 1e6:.0f}" for p in PHASES)
        print(f"    rank {number} device {device} | gap {rank['gap'] * 1e6:.0f}", flush=True)
        print(f"           host   {host} | host-bound {rank['host_bound_share']:.2f}", flush=True)


# --- planted faults ----------------------------------------------------------------------------------------
def planted(engine: Server, tokens: int) -> dict[str, Any]:
    """Plant each fault on the last rank (the slow hosts on the first one too); return what it changed on every rank."""
    engine.command(mode="on")
    # What an event pair around nothing reads is no part of the kernel. A clock's length differs between cards: the
    # rank that gets the kernel has measured it.
    slow = engine.ranks - 1
    empty = engine.command(calibrate=1)["ranks"][slow]["sleep_seconds"]
    cycles = 1_000_000
    length = engine.command(calibrate=cycles)["ranks"][slow]["sleep_seconds"] - empty
    cycles = int(cycles * KERNEL_SECONDS / length)
    length = engine.command(calibrate=cycles)["ranks"][slow]["sleep_seconds"] - empty
    faults: dict[str, dict[str, Any]] = {
        "kernel_before_collective": {"plant": "target_verify", "plant_ranks": [slow], "plant_cycles": cycles},
        "kernel_after_last_collective": {"plant": "after_draft_extend", "plant_ranks": [slow], "plant_cycles": cycles},
    }
    for rank in sorted({slow, 0}, reverse=True):
        for place in ("kv_cache", "before_cycle", "result"):
            faults[f"host_{place}_rank{rank}"] = {"plant": place, "plant_ranks": [rank], "plant_seconds": SLEEP_SECONDS}
    baseline = [figures.rank_means(gained) for gained in engine.request(1, tokens)["gained_by_rank"]]
    report: dict[str, Any] = {
        "kernel_seconds": length,
        "sleep_seconds": SLEEP_SECONDS,
        "baseline": baseline,
        "faults": {},
    }
    try:
        for name, fault in faults.items():
            engine.command(**fault)
            found = [figures.rank_means(gained) for gained in engine.request(1, tokens)["gained_by_rank"]]
            changes = [figures.moved(now, then) for now, then in zip(found, baseline, strict=True)]
            seconds = fault.get("plant_seconds", length)
            report["faults"][name] = {"fault": fault, "by_rank": found, "moved": changes}
            report["faults"][name]["shown"] = judge_plant(changes, fault["plant_ranks"][0], seconds)
            print(f"  {name} ({seconds * 1e6:.0f} us on rank {fault['plant_ranks'][0]}): changes in us", flush=True)
            print_moved(changes)
            print(f"    shown: {report['faults'][name]['shown']}", flush=True)
    finally:
        engine.command(plant="")
    return report


def print_moved(changes: Sequence[Mapping[str, Any]]) -> None:
    """Print what a fault changed on each rank."""
    for number, change in enumerate(changes):
        device = " ".join(f"{p}={change['device'][p] * 1e6:+.0f}" for p in PHASES)
        host = " ".join(f"{p}={change['host'][p] * 1e6:+.0f}" for p in PHASES)
        print(
            f"    rank {number} device {device} | gap {change['gap'] * 1e6:+.0f} | host {host} | "
            f"host-bound {change['host_bound_share']:+.2f}",
            flush=True,
        )


def judge_plant(changes: Sequence[Mapping[str, Any]], slow: int, seconds: float) -> dict[str, Any]:
    """Return where a fault on one rank shows: what grew by at least half of its length.

    Args:
        changes: By rank, see `figures.moved`.
        slow: The rank with the fault.
        seconds: Length of the fault in each cycle.

    Returns:
        For the slow rank and for the others (all of them) the phases in device and host time, and whether the gap grew.
    """

    def grown(change: Mapping[str, Any]) -> set[str]:
        found = {f"device {p}" for p in PHASES if change["device"][p] > seconds / 2}
        found |= {f"host {p}" for p in PHASES if change["host"][p] > seconds / 2}
        return found | ({"gap"} if change["gap"] > seconds / 2 else set())

    others = [grown(change) for rank, change in enumerate(changes) if rank != slow]
    return {
        "slow_rank": sorted(grown(changes[slow])),
        "all_others": sorted(set.intersection(*others)) if others else [],
        "named_by_host_time": sum(changes[slow]["host"].values())
        > max((sum(c["host"].values()) for rank, c in enumerate(changes) if rank != slow), default=0.0) + seconds / 2,
        "named_by_gap": changes[slow]["gap"]
        > max((c["gap"] for rank, c in enumerate(changes) if rank != slow), default=0.0) + seconds / 2,
    }


# --- cost --------------------------------------------------------------------------------------------------
def alternate(
    engine: Server,
    modes: Sequence[str],
    batch: int,
    tokens: int,
    repeats: int,
    deadline: float,
    checkpoint: Callable[[dict[str, Any]], None] = lambda table: None,
) -> dict[str, Any]:
    """Run the modes in turn, the order rotated each time; return ratios to the raw runs of the same round.

    A round counts when every rank was in the same mode in each of its runs, by its own count of cycles, and only as a
    whole.

    Args:
        engine: What is measured.
        modes: The first is what the others are compared with; what follows ``#`` tells equal modes apart.
        batch: Requests sent together.
        tokens: Of each.
        repeats: Rounds at most.
        deadline: No round begins after it.
        checkpoint: Gets the table after each round.
    """
    rounds: list[dict[str, dict[str, Any]]] = []
    void: list[str] = []
    table: dict[str, Any] = {}
    mode_now = ""
    for repeat in range(repeats):
        if time.time() > deadline:
            break
        shift = repeat % len(modes)
        results: dict[str, dict[str, Any]] = {}
        for mode in [*modes[shift:], *modes[:shift]]:
            wanted = mode.partition("#")[0]
            if wanted != mode_now:
                engine.command(mode=wanted)
                mode_now = wanted
            engine.command(costs=True)
            results[mode] = engine.request(batch, tokens)
            results[mode]["costs"] = [answer.get("costs") or [] for answer in engine.command(costs=True)["ranks"]]
        problem = void_reason(results)
        if problem:
            void.append(problem)
        else:
            rounds.append(results)
        table = cost_table(modes, batch, tokens, rounds, void)
        checkpoint(table)
    if mode_now != "on":
        engine.command(mode="on")
    for mode, entry in table.get("modes", {}).items():
        print(
            f"  batch {batch:2d} {mode:12s} {entry['median_tok_s']:8.1f} tok/s ratio {entry['ratio_median']:.4f} "
            f"{entry['ratio_ci95']} n={entry['pairs']} hook median by rank {entry['hook_us_median_by_rank']} us",
            flush=True,
        )
    return table


def void_reason(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why a round of runs cannot be compared, "" when it can."""
    for mode, result in results.items():
        cycles = [figures.gain(gained, "eagle_cycles_total") for gained in result["gained_by_rank"]]
        timed = [figures.total(gained, "eagle_batch_timed_cycles_total") for gained in result["gained_by_rank"]]
        kind = mode.partition("#")[0]
        if len(set(cycles)) != 1:
            return f"{mode}: the ranks counted {cycles} cycles"
        if (kind in figures.UNCOUNTED) != (cycles[0] == 0):
            return f"{mode}: {cycles[0]:.0f} cycles counted"
        if kind == "on" and timed != cycles:
            return f"{mode}: of {cycles} cycles {timed} were timed"
    return ""


def cost_table(
    modes: Sequence[str],
    batch: int,
    tokens: int,
    rounds: Sequence[Mapping[str, Mapping[str, Any]]],
    void: Sequence[str],
) -> dict[str, Any]:
    """Return speeds and ratios of whole rounds: mode -> run, of each round."""
    import statistics

    table: dict[str, Any] = {
        "batch": batch,
        "tokens": tokens,
        "wrong_outputs": sum(not run["tokens_right"] for results in rounds for run in results.values()),
        "void_rounds": list(void),
        "modes": {},
    }
    for mode in modes if rounds else ():
        speeds = [results[mode]["tok_s"] for results in rounds]
        pairs = [results[mode]["tok_s"] / results[modes[0]]["tok_s"] for results in rounds]
        low, high = figures.bootstrap(pairs)
        last = rounds[-1][mode]
        hooks = [
            [cost for results in rounds for cost in results[mode].get("costs", [[]] * (rank + 1))[rank]]
            for rank in range(len(last["gained_by_rank"]))
        ]
        counted = mode.partition("#")[0] not in figures.UNCOUNTED
        table["modes"][mode] = {
            "tok_s": [round(speed, 2) for speed in speeds],
            "median_tok_s": round(statistics.median(speeds), 2),
            "ratio_median": round(statistics.median(pairs), 5),
            "ratio_ci95": [round(low, 5), round(high, 5)],
            "pairs": len(pairs),
            "hook_us_median_by_rank": [round(statistics.median(costs) * 1e6, 2) if costs else None for costs in hooks],
            "means_by_rank": [figures.rank_means(gained) for gained in last["gained_by_rank"]],
            "acceptance": {
                **figures.acceptance(last["gained"], last["histogram"], last["verify_ct"]),
                "tokens_right": last["tokens_right"],
            }
            if counted
            else None,
        }
    return table


# --- recording ---------------------------------------------------------------------------------------------
def record(engine: Server, path: Path, bursts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Record real cycles of all ranks for the replay, and write what `eagle_exporter.demo.recording` converts."""
    engine.command(mode="on")
    groups: list[dict[str, Any]] = []
    for batch, tokens in bursts:
        engine.command(record=True)
        engine.request(batch, tokens)
        answers = engine.command(take_records=True)["ranks"]
        first, *others = [answer["records"] for answer in answers]
        groups.append({"batch": batch, "cycles": first, "other_ranks": others})
        path.write_bytes(gzip.compress(json.dumps(groups).encode()))
    return {
        "cycles": {group["batch"]: len(group["cycles"]) for group in groups},
        "same_length": all(len(cycles) == len(group["cycles"]) for group in groups for cycles in group["other_ranks"]),
        "ranks": engine.ranks,
    }


# --- kernels -----------------------------------------------------------------------------------------------
def kernels(engine: Server, tokens: int, cycles: int) -> dict[str, Any]:
    """Capture each rank's kernels, without a fault and with an extra kernel before the collective on the last rank.

    The slow rank is the one with the least time in all-reduce kernels: it never waits.
    """
    slow = engine.ranks - 1
    empty = engine.command(mode="on", calibrate=1)["ranks"][slow]["sleep_seconds"]
    length = engine.command(calibrate=1_000_000)["ranks"][slow]["sleep_seconds"] - empty
    plant = {"plant": "target_verify", "plant_ranks": [slow], "plant_cycles": int(1e6 * KERNEL_SECONDS / length)}
    report: dict[str, Any] = {}
    for name, command in (("without", {"plant": ""}), ("with", plant)):
        engine.command(**command)
        report[name] = [_capture(engine, rank, tokens, cycles) for rank in range(engine.ranks)]
    engine.command(plant="")
    report["judged"] = judge_kernels(report["without"], report["with"], slow)
    print(f"  all-reduce seconds per cycle by rank: {report['judged']}", flush=True)
    return report


def _capture(engine: Server, rank: int, tokens: int, cycles: int) -> dict[str, Any]:
    """Return what ``eagle-exporter profile`` says of one rank while requests are served."""
    root = os.environ["EAGLE_EXPORTER_DIR"]
    command = [sys.executable, "-m", "eagle_exporter", "profile", "--dir", root, "--server", engine.name, "--json"]
    command += ["--rank", str(rank), "--cycles", str(cycles), "--timeout", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.time() + 60
        while process.poll() is None and time.time() < deadline:
            engine.request(1, tokens)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"eagle-exporter profile --rank {rank}: {errors.strip()}")
    result: dict[str, Any] = json.loads(output)
    return {
        "cycles": result["cycles"],
        "device": result["device"],
        "phases": {
            phase: {
                "seconds": part["seconds"] / result["cycles"],
                "classes": {name: seconds / result["cycles"] for name, seconds in part["classes"].items()},
            }
            for phase, part in result["phases"].items()
        },
    }


def judge_kernels(
    without: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], slow: int
) -> dict[str, Any]:
    """Return verify's all-reduce seconds per cycle by rank, and whether the slow rank has the least."""

    def allreduce(capture: Mapping[str, Any]) -> float:
        classes = capture["phases"]["target_verify"]["classes"]
        return float(sum(seconds for name, seconds in classes.items() if name.startswith("allreduce")))

    seconds = [allreduce(capture) for capture in found]
    return {
        "without": [allreduce(capture) for capture in without],
        "with": seconds,
        "slow_rank_has_the_least": seconds[slow] == min(seconds) and len(set(seconds)) > 1,
    }


# --- NCCL's settings ---------------------------------------------------------------------------------------
def nccl_figures(engine: Server, requests: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the settings that the exporter shows, and what verify takes with them, from the exporter's own series."""
    leader = engine.snapshots()[0]
    report: dict[str, Any] = {
        "eagle_nccl_config_info": info(leader, "eagle_nccl_config_info"),
        "config_id": info(leader, "eagle_spec_config_info").get("config_id"),
        "start_seconds": engine.start_seconds,
    }
    for batch, tokens in requests:
        bounds, before = verify_buckets(engine.snapshots()[0])
        result = engine.request(batch, tokens)
        _, after = verify_buckets(engine.snapshots()[0])
        counts = [new - old for old, new in zip(before, after, strict=True)]
        means = figures.rank_means(result["gained"])
        report[f"batch{batch}"] = entry = {
            "verify_mean": means["device"]["target_verify"] if means["timed"] else None,
            **{f"verify_p{q * 100:g}": figures.quantile(q, bounds, counts) for q in PERCENTILES},
            "draft_mean": means["device"]["draft_steps"] if means["timed"] else None,
            "cycles": means["timed"],
            "host_bound_share": means.get("host_bound_share"),
            "tok_s": result["tok_s"],
            "tokens_right": result["tokens_right"],
        }
        shown = {key: f"{value * 1e3:.3f} ms" for key, value in entry.items() if key.startswith("verify_") and value}
        print(
            f"  NCCL {report['eagle_nccl_config_info']} batch {batch}: {shown} {result['tok_s']:.1f} tok/s", flush=True
        )
    return report


def verify_buckets(rank: Any) -> tuple[list[float], list[float]]:
    """Return bounds of the histogram of target verify, and its counts: not cumulative, ``+Inf`` last."""
    family = rank.family("eagle_phase_duration_seconds")
    for series in family.series:
        if "target_verify" in series.labels:
            return list(family.bounds), list(series.buckets)
    raise LookupError("no histogram of target verify")


def judge_nccl(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether every setting is seen in the exporter's info series and makes a configuration of its own."""
    shown = [tuple(sorted(entry["eagle_nccl_config_info"].items())) for entry in settings.values()]
    identifiers = [entry["config_id"] for entry in settings.values()]
    default = settings.get("default", {})
    ratios: dict[str, dict[str, float]] = {}
    for name, entry in settings.items():
        for batch in (key for key in entry if key.startswith("batch")):
            if entry[batch]["verify_mean"] and default.get(batch, {}).get("verify_mean"):
                ratios.setdefault(batch, {})[name] = entry[batch]["verify_mean"] / default[batch]["verify_mean"]
    return {
        "settings": len(settings),
        "info_differs": len(set(shown)) == len(shown),
        "config_id_differs": len(set(identifiers)) == len(identifiers),
        "verify_mean_to_default": ratios,
    }
