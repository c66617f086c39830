"""Generates the rule tests beside it, ``*.test.yaml`` for ``promtool test rules``.

``python deploy/prometheus/tests/stories.py`` writes them, ``--check`` only tells whether they are up to date.

A test is a story of one server: some hours of ordinary work, then what the story is about. Every alert is checked in
every story, so a story about one fault also shows that no other alert goes off. The stories in ``quiet`` have no
fault at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from deploy.prometheus import build  # noqa: E402
from eagle_exporter import catalogue  # noqa: E402

SERVER = "gpu-1:30000"
TARGET = {"job": build.SHIPPED.job, "instance": "gpu-1:10077"}
ABSENT = None
HOUR = 60


@dataclass(frozen=True)
class Cell:
    """Work at one batch size and step count, per cycle; times in milliseconds."""

    batch_size: str = "5-8"
    num_steps: str = "3"
    requests: float = 6.0
    verify: float = 8.0
    rest: float = 2.0
    gap: float = 0.5
    accepted: float = 1.3
    context: float = 1000.0
    cycles: float = 1200.0
    """In a minute."""


WORK = Cell()


@dataclass(frozen=True)
class State:
    """A stretch of `minutes` in which everything is constant."""

    minutes: int
    cells: tuple[Cell, ...] = (WORK,)
    config_id: str = "aaaa0001"
    overlap: str = "true"
    up: float = 1.0
    rank_up: tuple[float | None, ...] = (1.0, 1.0)
    running: float = 6.0
    restarted: bool = False
    """Counters begin at 0 with this stretch."""
    silent: bool = False
    """The exporter cannot be scraped, or no rank has a file yet."""
    host: tuple[float, float] = (1.0, 1.0)
    """Milliseconds of host time per cycle, by rank."""
    extra_gap: tuple[float, float] = (0.0, 0.0)
    host_bound: tuple[float, float] = (0.02, 0.02)
    timing: str = "on"
    hooks_down: tuple[str, ...] = ()
    dropped: float = 0.0
    """Share of the cycles."""
    scrape_seconds: float = 0.02
    baseline: float | None = 9.0
    missing: tuple[str, ...] = ()
    replica_verify: float | None = None
    """With a value there is a second replica (dp_rank 1) whose verify takes so long."""
    captured: float | None = None
    """Cycles of a minute that a capture of kernels leaves out of every timing series; None: no kernel series."""
    clock: str = ""
    """Where it says something: the clock of all ranks."""
    hook_family: str = ""


@dataclass(frozen=True)
class Story:
    """A named sequence of states, and which alerts fire when.

    Attributes:
        name: What it is about.
        states: One after the other.
        fires: Minute -> alert (without prefix) -> (labels, rendered description) of each that fires.
        quiet_at: Minutes at which nothing fires at all.

    """

    name: str
    states: tuple[State, ...]
    fires: Mapping[int, Mapping[str, list[tuple[dict[str, str], str]]]] = field(default_factory=dict)
    quiet_at: tuple[int, ...] = ()


def _common(tp_rank: int, dp_rank: str = "") -> dict[str, str]:
    return {
        "server": SERVER,
        "model_name": "kimi-k2.5",
        "engine_type": "unified",
        "tp_rank": str(tp_rank),
        "pp_rank": "0",
        "dp_rank": dp_rank,
    }


class _Series:
    """Collects values per stretch and writes them in promtool's notation."""

    def __init__(self) -> None:
        self.parts: dict[str, list[str]] = {}
        self.value: dict[str, float] = {}
        self.until: dict[str, int] = {}

    def gauge(self, name: str, labels: Mapping[str, str], now: int, minutes: int, value: float | None) -> None:
        if value is not None:
            self._part(name, labels, now, minutes, f"{value:g}+0x{minutes - 1}")

    def counter(
        self, name: str, labels: Mapping[str, str], now: int, minutes: int, rate: float, restarted: bool
    ) -> None:
        key = _series(name, labels)
        start = 0.0 if restarted else self.value.get(key, 0.0)
        self._part(name, labels, now, minutes, f"{start:.10g}+{rate:.10g}x{minutes - 1}")
        self.value[key] = start + rate * minutes

    def _part(self, name: str, labels: Mapping[str, str], now: int, minutes: int, text: str) -> None:
        key = _series(name, labels)
        parts = self.parts.setdefault(key, [])
        missing = now - self.until.get(key, 0)
        if missing:
            # What an exporter no longer shows is stale at once.
            parts.append("stale" if parts else "_")
            if missing > 1:
                parts.append(f"_x{missing - 1}")
        parts.append(text)
        self.until[key] = now + minutes


def _series(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}"


def _rank_series(series: _Series, state: State, now: int) -> None:
    minutes = state.minutes
    total = sum(cell.cycles for cell in state.cells)
    ranks = [(0, ""), (1, "")] if state.replica_verify is None else [(0, "0"), (1, "1")]

    def has(name: str) -> bool:
        return name not in state.missing

    def counter(name: str, labels: Mapping[str, str], rate: float) -> None:
        if has(name):
            series.counter(name, labels, now, minutes, rate, state.restarted)

    def gauge(name: str, labels: Mapping[str, str], value: float | None) -> None:
        if has(name):
            series.gauge(name, labels, now, minutes, value)

    for tp_rank, dp_rank in ranks:
        common = _common(tp_rank, dp_rank)
        replica = dp_rank != ""
        recording = tp_rank == 0 or replica
        for cell in state.cells:
            where = {**common, "batch_size": cell.batch_size, "num_steps": cell.num_steps}
            verify = state.replica_verify if replica and tp_rank == 1 and state.replica_verify else cell.verify
            drafts = cell.cycles * cell.requests if cell.num_steps != "0" else 0.0
            timed_cycles = cell.cycles - (state.captured or 0.0) if state.timing == "on" else 0.0
            counter("eagle_batch_cycles_total", where, cell.cycles)
            counter("eagle_batch_timed_cycles_total", where, timed_cycles)
            timed = timed_cycles / 1e3
            counter("eagle_batch_phase_seconds_total", {**where, "phase": "target_verify"}, timed * verify)
            counter("eagle_batch_phase_seconds_total", {**where, "phase": "draft_steps"}, timed * cell.rest)
            counter("eagle_batch_gap_seconds_total", where, timed * (cell.gap + state.extra_gap[tp_rank]))
            if recording:
                counter("eagle_batch_drafts_total", where, drafts)
                counter("eagle_batch_accepted_tokens_total", where, drafts * cell.accepted)
                counter("eagle_batch_context_tokens_total", where, drafts * cell.context)
        counter("eagle_cycles_total", common, total)
        timed_total = total - (state.captured or 0.0)
        host = state.host[tp_rank] * timed_total / 1e3
        counter("eagle_phase_host_seconds_total", {**common, "phase": "draft_steps"}, host)
        counter("eagle_host_bound_cycles_total", common, state.host_bound[tp_rank] * timed_total)
        counter("eagle_cycles_dropped_total", {**common, "reason": "pool_exhausted"}, state.dropped * total)
        if state.captured is not None:
            _kernel_series(counter, common, state.captured)
        gauge("eagle_running_requests", common, state.running)
        for reason in ("on", "off", "fuse_cost", "hooks_down"):
            gauge("eagle_timing_enabled", {**common, "reason": reason}, float(reason == state.timing))
        for hook in ("cycle", "target_verify"):
            gauge("eagle_hook_up", {**common, "hook": hook}, float(hook not in state.hooks_down))
        info = {**common, "config_id": state.config_id, "overlap": state.overlap}
        if state.hook_family:
            info["hook_family"] = state.hook_family
        gauge("eagle_spec_config_info", info, 1.0)
        if state.clock:
            gauge("eagle_timing_info", {**common, "clock": state.clock}, 1.0)
    gauge("eagle_baseline_decode_seconds", {**_common(0), "batch_size": "5-8"}, _seconds(state.baseline))


def _kernel_series(
    counter: Callable[[str, Mapping[str, str], float], None], common: dict[str, str], cycles: float
) -> None:
    """What a capture adds in a minute. Its cycles are slow; they count as cycles, and are not timed."""
    verify, busy = {**common, "phase": "target_verify"}, cycles * 0.020
    counter("eagle_cycles_excluded_total", {**common, "reason": "profiled"}, cycles)
    counter("eagle_kernel_profiled_cycles_total", common, cycles)
    counter("eagle_kernel_captures_total", {**common, "outcome": catalogue.CAPTURE_OUTCOMES[0]}, min(1.0, cycles))
    counter("eagle_kernel_phase_seconds_total", verify, cycles * 0.024)
    counter("eagle_kernel_busy_seconds_total", verify, busy)
    for kernel_class, share in ((catalogue.NCCL_ALLREDUCE, 0.6), ("gemm", 0.4)):
        counter("eagle_kernel_seconds_total", {**verify, "kernel_class": kernel_class}, busy * share)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def input_series(states: Iterable[State]) -> dict[str, str]:
    """Return the series of a story with their values in promtool's notation."""
    series = _Series()
    now = 0
    for state in states:
        series.gauge("up", TARGET, now, state.minutes, state.up)
        if state.up:
            series.gauge("scrape_duration_seconds", TARGET, now, state.minutes, state.scrape_seconds)
        if not state.silent:
            _rank_series(series, state, now)
        for tp_rank, up in enumerate(state.rank_up):
            if state.up != 0.0:
                series.gauge("eagle_rank_up", {**_common(tp_rank), **TARGET}, now, state.minutes, up)
        now += state.minutes
    for key, parts in series.parts.items():
        if series.until[key] < now:
            parts.append("stale")
    return {key: " ".join(parts) for key, parts in series.parts.items()}


# --- stories ------------------------------------------------------------------------------------------------

#: Enough for a baseline: 3 hours of samples that are an hour old, and a little.
HISTORY = State(4 * HOUR + 10)
#: For what needs no baseline.
SHORT = State(40)
STOPPED = State(2, up=0.0, silent=True, rank_up=(None, None), restarted=True)
LOADING = State(8, silent=True, rank_up=(None, None), restarted=True)


def quiet_stories() -> list[Story]:
    """Stories in which nothing is wrong."""
    begin = HISTORY.minutes
    wide = Cell("17-32", requests=17, verify=12.0)
    five = Cell(num_steps="5", verify=11.0, rest=3.5, accepted=1.7)
    captures = State(1, captured=12.0), State(9, captured=0.0)
    excess = State(1, captured=300.0), State(1, captured=0.0)
    slow = State(30, _work(cycles=20.0), captured=0.0)
    growing = tuple(
        State(20, (replace(WORK, context=1000.0 * 1.1**step, verify=round(8.0 * 1.07**step, 3)),))
        for step in range(1, 10)
    )
    return [
        Story(
            "the batch doubles, within its bucket and into others",
            (
                HISTORY,
                State(begin, (wide,)),
                State(HOUR, (replace(wide, requests=32.0, verify=16.0),)),
                State(HOUR, (replace(WORK, batch_size="9-16", requests=12.0, verify=9.7),)),
                State(40),
            ),
            quiet_at=tuple(begin + minute for minute in (20, 249, 270, 309, 330, 369, 380, 409)),
        ),
        Story(
            "sequences grow slowly to more than twice their length",
            (HISTORY, *growing),
            quiet_at=tuple(begin + minute for minute in (10, 40, 60, 80, 100, 120, 140, 179)),
        ),
        Story(
            "traffic stops and resumes",
            (HISTORY, State(HOUR, (replace(WORK, cycles=0.0),), running=0.0), State(HOUR)),
            quiet_at=tuple(begin + minute for minute in (2, 6, 30, 59, 62, 70, 119)),
        ),
        Story(
            "the server restarts and its counters begin at 0",
            (HISTORY, STOPPED, LOADING, State(HOUR, restarted=True)),
            quiet_at=tuple(begin + minute for minute in (1, 5, 9, 12, 20, 69)),
        ),
        Story(
            "the first hours, in which cost moves by half",
            (
                State(HOUR),
                State(HOUR, (replace(WORK, verify=12.0, accepted=0.9),)),
                State(HOUR, (replace(WORK, verify=6.0, accepted=1.8),)),
            ),
            quiet_at=(5, 59, 90, 119, 150, 179),
        ),
        Story(
            "adaptive speculation changes to another step count and back",
            (HISTORY, State(HOUR, (five,)), State(HOUR), State(3 * HOUR, (five,)), State(HOUR)),
            quiet_at=tuple(begin + minute for minute in (20, 50, 59, 80, 110, 140, 299, 320, 359)),
        ),
        Story(
            "series are missing: no scheduler hook, no context, no host time",
            (
                replace(HISTORY, missing=_MISSING),
                State(HOUR, (replace(WORK, verify=8.3),), missing=_MISSING),
            ),
            quiet_at=tuple(begin + minute for minute in (-10, 20, 59)),
        ),
        Story(
            "nothing but the exporter itself",
            (State(2 * HOUR, silent=True, rank_up=(None, None)),),
            quiet_at=(10, 119),
        ),
        Story(
            "kernels are captured: once, every ten minutes, and far too often",
            (
                replace(HISTORY, captured=0.0),
                State(1, captured=12.0),
                State(29, captured=0.0),
                *captures * 6,
                *excess * 30,
            ),
            quiet_at=tuple(begin + minute for minute in (0, 1, 2, 6, 30, 31, 50, 89, 95, 110, 130, 149)),
        ),
        Story(
            "the host of a rank waits for another rank inside the cycle: on the CPU, and with an older worker",
            (State(HOUR, host=(1.0, 4.0), clock="host"), State(HOUR, host=(1.0, 4.0), hook_family="multi-layer-v1")),
            quiet_at=(30, 59, 90, 119),
        ),
        Story(
            "every cycle of a minute is captured, of a server that decodes slowly",
            (slow, replace(slow, minutes=1, captured=20.0), slow),
            quiet_at=(29, 30, 31, 33, 36, 60),
        ),
        Story(
            "a deploy with another configuration, whose verify takes half longer",
            (
                HISTORY,
                STOPPED,
                LOADING,
                State(HOUR, (replace(WORK, verify=12.0, accepted=0.9),), config_id="bbbb0002", restarted=True),
                State(2 * HOUR, (replace(WORK, verify=12.0, accepted=0.9),), config_id="bbbb0002"),
            ),
            fires={
                minute: {
                    "ConfigurationChanged": [
                        (
                            {"server": SERVER},
                            _CHANGED,
                        )
                    ]
                }
                for minute in (begin + 11, begin + 40)
            },
            quiet_at=tuple(begin + minute for minute in (5, 70, 180, 189)),
        ),
    ]


_MISSING = (
    "eagle_batch_gap_seconds_total",
    "eagle_batch_context_tokens_total",
    "eagle_phase_host_seconds_total",
    "eagle_host_bound_cycles_total",
    "eagle_running_requests",
    "eagle_baseline_decode_seconds",
)


def _firing(
    name: str,
    alert: str,
    fault: State,
    labels: dict[str, str] | list[dict[str, str]],
    description: str | list[str],
    *,
    after: int,
    before: int | None = None,
    resolved: int | None = None,
    history: State = HISTORY,
    also: Mapping[str, list[tuple[dict[str, str], str]]] | None = None,
) -> Story:
    """A story of ordinary work, a fault, and ordinary work again.

    `after` so many minutes of the fault the alert fires and `before` it does not; `resolved` minutes after the fault
    it does not any more.
    """
    start = history.minutes
    all_labels = [labels] if isinstance(labels, dict) else labels
    texts = [description] if isinstance(description, str) else description
    expected = {alert: list(zip(all_labels, texts, strict=True)), **(also or {})}
    states: tuple[State, ...] = (history, fault)
    quiet = [start - 1] + ([start + before] if before is not None else [])
    if resolved is not None:
        states += (replace(history, minutes=resolved + 1),)
        quiet.append(start + fault.minutes + resolved)
    return Story(name, states, {start + after: expected}, tuple(quiet))


def _work(**changes: float) -> tuple[Cell, ...]:
    return (replace(WORK, **changes),)  # type: ignore[arg-type]


_SHARE = "On gpu-1:30000 the ratio of verify to the rest of the cycle is {} times"
_SLOW = "On gpu-1:30000 one verify takes {} times"
_CELL = " By cell: batch size 5-8, 3 steps: {};"
_ACCEPTED = "On gpu-1:30000 a draft gets {} times the accepted tokens of"
_MEDIAN = " the median of the 2d before, at equal configuration, batch size and step count and similar context length. "


def _share(ratio: str, percent: str) -> tuple[dict[str, str], str]:
    now = f"Verify is now {percent} of the cycle."
    return _DRIFT, f"{_SHARE.format(ratio)}{_MEDIAN}{now}{_CELL.format(ratio)}"


def _slow(ratio: str, milliseconds: str) -> tuple[dict[str, str], str]:
    now = f"The mean cycle takes {milliseconds}."
    return _DRIFT, f"{_SLOW.format(ratio)}{_MEDIAN}{now}{_CELL.format(ratio)}"


def _accepted(ratio: str, tokens: str) -> tuple[dict[str, str], str]:
    now = f"Tokens per cycle are now {tokens}."
    return _DRIFT, f"{_ACCEPTED.format(ratio)}{_MEDIAN}{now}{_CELL.format(ratio)}"


_DRIFT = {"server": SERVER, "config_id": "aaaa0001"}
_ONE = {"server": SERVER}
_RANK = _common(1)


def firing_stories() -> list[Story]:
    """One fault each, at the least the one every alert is for."""
    stuck = "has had running requests, 6 at least, for 5m without a single decode cycle."
    exporter = {**TARGET, "server": SERVER}
    return [
        _firing(
            "verify takes 27 % longer",
            "VerifyShareDrift",
            State(50, _work(verify=10.16)),
            *_share("1.27", "83.55%"),
            after=45,
            before=20,
            resolved=100,
            also={"VerifySlow": [_slow("1.27", "12.16ms")]},
        ),
        _firing(
            "verify takes 27 % less",
            "VerifyShareDrift",
            State(50, _work(verify=5.84)),
            *_share("0.73", "74.49%"),
            after=45,
            before=20,
            resolved=100,
        ),
        _firing(
            "verify takes 18 % longer, too little to be told at once",
            "VerifyShareDriftSlow",
            State(5 * HOUR, _work(verify=9.44)),
            _DRIFT,
            _SHARE.format("1.10").replace(" is ", " was ")
            + _MEDIAN.replace("length. ", "length over the last 12h. ")
            + "Verify is now 82.52% of the cycle. By cell: batch size 5-8, 3 steps: 1.18;",
            after=290,
            before=200,
            resolved=130,
            history=replace(HISTORY, minutes=8 * HOUR + 10),
        ),
        _firing(
            "the GPU is slower in everything, as when its clock is throttled",
            "VerifySlow",
            State(50, _work(verify=10.4, rest=2.6)),
            *_slow("1.30", "13ms"),
            after=45,
            before=20,
        ),
        _firing(
            "a fifth less is accepted",
            "AcceptanceDrift",
            State(50, _work(accepted=1.04)),
            *_accepted("0.80", "2.04"),
            after=45,
            before=15,
        ),
        _firing(
            "a fifth more is accepted, as when answers repeat themselves",
            "AcceptanceDrift",
            State(50, _work(accepted=1.56)),
            *_accepted("1.20", "2.56"),
            after=45,
            before=15,
        ),
        _firing(
            "nothing is accepted any more",
            "AcceptanceCollapsed",
            State(51, _work(accepted=0.05)),
            _ONE,
            "On gpu-1:30000 a cycle yields 1.05 tokens per request; 1 means that nothing of the draft is accepted and "
            "the time for draft and verify is lost.",
            after=50,
            before=8,
            also={
                "AcceptanceDrift": [_accepted("0.04", "1.05")],
                "SpeculationNotPayingOff": [(_ONE, _SPEEDUP.format("0.90"))],
            },
        ),
        _firing(
            "the gap between cycles eats what speculation gains",
            "SpeculationNotPayingOff",
            State(HOUR, _work(gap=14.0)),
            _ONE,
            _SPEEDUP.format("0.86"),
            after=50,
            before=25,
            resolved=10,
            history=SHORT,
        ),
        _firing(
            "the host of one rank is slow",
            "RankSkew",
            State(HOUR, host=(1.0, 4.0)),
            {**_RANK, "signal": "host time"},
            _SKEW.format("host time", "30%"),
            after=45,
            before=20,
            history=SHORT,
        ),
        _firing(
            "one rank has a long gap between cycles",
            "RankSkew",
            State(HOUR, extra_gap=(0.0, 2.5)),
            {**_RANK, "signal": "gap"},
            _SKEW.format("gap", "25%"),
            after=45,
            before=20,
            history=SHORT,
        ),
        _firing(
            "the GPU of one rank waits for its host",
            "RankSkew",
            State(HOUR, host_bound=(0.02, 0.48)),
            {**_RANK, "signal": "host-bound cycles"},
            _SKEW.format("host-bound cycles", "46%"),
            after=45,
            before=20,
            history=SHORT,
        ),
        _firing(
            "one of two replicas is slow",
            "RankSkew",
            State(2 * HOUR, replica_verify=12.0),
            {"server": SERVER, "dp_rank": "1", "signal": "verify"},
            "On gpu-1:30000 replica 1 takes 1.50 times as long for a verify as the others at equal batch size and "
            "similar context length.",
            after=45,
            before=20,
            history=replace(SHORT, replica_verify=8.0),
        ),
        _firing(
            "the fuse has stopped the timing",
            "TimingOff",
            State(HOUR, timing="fuse_cost"),
            {"server": SERVER, "reason": "fuse_cost"},
            _TIMING.format("fuse_cost"),
            after=17,
            before=14,
            resolved=2,
            history=SHORT,
        ),
        _firing(
            "timing was switched off and forgotten",
            "TimingOff",
            State(HOUR, timing="off", hooks_down=("cycle", "target_verify")),
            {"server": SERVER, "reason": "off"},
            _TIMING.format("off"),
            after=17,
            before=14,
            resolved=2,
            history=SHORT,
        ),
        _firing(
            "a hook is not attached",
            "HooksDown",
            State(HOUR, hooks_down=("target_verify",)),
            {"server": SERVER, "hook": "target_verify"},
            "On gpu-1:30000 the hook target_verify is not attached on 2 rank(s); the metrics that need it are missing. "
            "The usual cause is a version of SGLang that this exporter does not know yet.",
            after=6,
            before=4,
            resolved=2,
            history=SHORT,
        ),
        _firing(
            "the GPU waits for the host in most cycles",
            "CycleHostBound",
            State(HOUR, host_bound=(0.7, 0.7)),
            _ONE,
            "On gpu-1:30000 the GPU had run out of work at the start of 70% of the cycles although the overlap "
            "scheduler is on. Phase times then contain launch latency and must not be read as GPU work.",
            after=36,
            before=29,
            resolved=6,
            history=SHORT,
        ),
        Story(
            "without the overlap scheduler the GPU always waits, which is no fault",
            (State(2 * HOUR, overlap="false", host_bound=(1.0, 1.0)),),
            quiet_at=(60, 119),
        ),
        _firing(
            "a tenth of the cycles is dropped",
            "CyclesDropped",
            State(HOUR, dropped=0.1),
            _ONE,
            "On gpu-1:30000 the times of 10% of the cycles could not be recorded. Counts of tokens are complete, the "
            "cycle breakdown may not be typical.",
            after=25,
            before=14,
            resolved=6,
            history=SHORT,
        ),
        _firing(
            "a scheduler process has ended",
            "RankGone",
            State(HOUR, silent=True, rank_up=(1.0, 0.0)),
            {**_RANK, **TARGET},
            "On gpu-1:30000 the scheduler process of tp rank 1, pp rank 0 is gone and no new one has taken its place.",
            after=6,
            before=4,
            resolved=2,
            history=SHORT,
        ),
        _firing(
            "requests are running and nothing is decoded",
            "NoCyclesWithRunningRequests",
            State(30, _work(cycles=0.0)),
            [_common(0), _common(1)],
            [f"On gpu-1:30000 tp rank {rank} {stuck}" for rank in (0, 1)],
            after=9,
            before=6,
            resolved=2,
            history=SHORT,
        ),
        _firing(
            "the exporter cannot be scraped",
            "ExporterDown",
            State(HOUR, up=0.0, silent=True),
            exporter,
            "Prometheus cannot scrape gpu-1:10077, which shows the server gpu-1:30000. No other alert about it can "
            "fire until it is back.",
            after=6,
            before=4,
            resolved=2,
            history=SHORT,
        ),
        Story(
            "an exporter that never answered",
            (State(30, up=0.0, silent=True),),
            {6: {"ExporterDown": [(TARGET, _NEVER)]}},
            (4,),
        ),
        _firing(
            "scrapes are slow",
            "ScrapeSlow",
            State(30, scrape_seconds=4.0),
            TARGET,
            "A scrape of gpu-1:10077 takes 4s; at the scrape timeout its metrics go missing.",
            after=11,
            before=9,
            resolved=2,
            history=SHORT,
        ),
    ]


_CHANGED = (
    f"{SERVER} has run 2 configurations in the last 1h: aaaa0001 bbbb0002. Baselines of a new configuration begin anew."
)
_SPEEDUP = (
    "On gpu-1:30000 speculation makes decoding {} times as fast as plain decoding at the batch sizes whose cost "
    "without speculation is known. Verify is 80% of the cycle."
)
_SKEW = "On gpu-1:30000 tensor parallel rank 1 exceeds the other ranks of its group in {} by {} of the cycle."
_TIMING = (
    "On gpu-1:30000 timing is stopped on 2 rank(s), state {}: off is a command, fuse_cost is timing that cost more "
    "than 2 % of the cycle, fuse_errors is repeated errors in the hooks. Verify and drift are not watched meanwhile."
)
_NEVER = "Prometheus cannot scrape gpu-1:10077. No other alert about it can fire until it is back."


def lasting_stories() -> list[Story]:
    """How long a fault that nobody repairs is told.

    The median forgets a fault once it makes up half of what the median is taken over: after as many hours as there
    were of ordinary work before it, and one, and at most after 25.
    """
    fault = {"VerifyShareDrift": [_share("1.27", "83.55%")], "VerifySlow": [_slow("1.27", "12.16ms")]}
    half_a_day = 12 * HOUR + 10
    return [
        Story(
            "verify takes 27 % longer for 12 hours, after half a day of ordinary work",
            (replace(HISTORY, minutes=half_a_day), State(12 * HOUR + 5, _work(verify=10.16))),
            {half_a_day + minute: fault for minute in (40, *range(HOUR, 12 * HOUR + 1, HOUR))},
            (half_a_day - 1, half_a_day + 15),
        ),
        Story(
            "the same after four hours of ordinary work: told for as long, and an hour",
            (HISTORY, State(7 * HOUR, _work(verify=10.16))),
            {HISTORY.minutes + minute: fault for minute in (35, 2 * HOUR, 4 * HOUR, 5 * HOUR)},
            (HISTORY.minutes + 7 * HOUR - 1,),
        ),
    ]


# --- writing ------------------------------------------------------------------------------------------------

_FILES: dict[str, tuple[str, Callable[[], list[Story]]]] = {
    "quiet.test.yaml": ("Nothing is wrong: no alert fires.", quiet_stories),
    "firing.test.yaml": ("Each alert fires on its fault, and no other.", firing_stories),
    "lasting.test.yaml": ("A lasting fault is told for at least twelve hours.", lasting_stories),
}


def render(title: str, stories: Iterable[Story], rules: build.Rules, rule_files: Iterable[str]) -> str:
    """Return a test file."""
    groups = [group.name for group in (*rules.recording_groups(), rules.alerts())]
    lines = [
        f"# {title} Generated by deploy/prometheus/tests/stories.py; do not edit.",
        "rule_files:",
        *(f"  - {file}" for file in rule_files),
        "evaluation_interval: 1m",
        f"group_eval_order: [{', '.join(groups)}]",
        "tests:",
    ]
    by_name = {alert.name: alert for alert in rules.all_alerts()}
    for story in stories:
        lines += [f"  - name: {_quoted(story.name)}", "    interval: 1m", "    input_series:"]
        for series, values in input_series(story.states).items():
            lines += [f"      - series: {_quoted(series)}", f"        values: {_quoted(values)}"]
        lines.append("    alert_rule_test:")
        for minute in sorted({*story.fires, *story.quiet_at}):
            expected = story.fires.get(minute, {})
            unknown = set(expected) - set(by_name)
            if unknown:
                raise ValueError(f"{story.name}: no such alert: {unknown}")
            for name, alert in by_name.items():
                lines.append(f"      - {{eval_time: {minute}m, alertname: {alert.alert}}}")
                if name in expected:
                    lines[-1] = f"      - eval_time: {minute}m"
                    lines += [f"        alertname: {alert.alert}", "        exp_alerts:"]
                    for labels, description in expected[name]:
                        lines.append("          - exp_labels:")
                        # A label without a value is none for Prometheus.
                        shown = {"severity": alert.severity, **{key: text for key, text in labels.items() if text}}
                        lines += [f"              {label}: {_quoted(value)}" for label, value in shown.items()]
                        lines.append("            exp_annotations:")
                        annotations = {**alert.annotations, "description": description}
                        lines += [f"              {key}: {_quoted(text)}" for key, text in annotations.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def files() -> dict[str, str]:
    """Return the test files by name."""
    rules = build.Rules()
    rule_files = [f"../rules/{name}" for name in build.files()]
    return {name: render(title, stories(), rules, rule_files) for name, (title, stories) in _FILES.items()}


def main() -> int:
    """Write or check the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    arguments = parser.parse_args()
    stale = []
    for name, text in files().items():
        path = HERE / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not arguments.check:
                path.write_text(text)
    if arguments.check and stale:
        print(f"out of date: {', '.join(stale)}; run python deploy/prometheus/tests/stories.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
