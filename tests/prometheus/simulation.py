"""Days of one server's life, minute by minute: what its exporter would have shown to Prometheus.

The costs of the phases come from cycles recorded with CUDA events on an H200 (EAGLE-3 chain, 3 steps, 4 draft
tokens, medians of 58 cycles at six context lengths each, batch size 1 and 16): verify took 5.05 ms at 62 tokens
and 6.39 ms at 744 with one request, 6.82 ms and 11.44 ms with sixteen. The lines through those points are the
table below; between and beyond the two batch sizes they are interpolated.

Traffic: a day and a week (nights and weekends are quiet, Sunday night there is none for some hours), requests that
come and go within minutes, context that follows the time of day and grows over the weeks, acceptance that follows
the kind of work, deploys that change the configuration, restarts that reset counters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

MINUTE = 60
HOUR = 3600
DAY = 86400

#: Milliseconds at batch size 1 and 16: (at context 0, per token of context).
PHASE_COSTS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "target_verify": ((4.93, 0.00196), (6.34, 0.00692)),
    "draft_steps": ((0.411, 0.000031), (0.4525, 0.000056)),
    "draft_extend": ((0.304, 0.000069), (0.355, 0.000214)),
    "verify_overhead": ((0.076, 0.0), (0.087, 0.0)),
}
GAP_MILLISECONDS = 0.022
HOST_MILLISECONDS = 1.9
"""Of the scheduler process for one cycle; with the overlap scheduler it hides behind the GPU."""

CELLS = ((4, "3-4"), (8, "5-8"), (16, "9-16"), (32, "17-32"))
ACCEPTED_PER_DRAFT = 1.31
CONTEXT_TOKENS = 700.0
TARGET = 'job="eagle-exporter",instance="gpu-1:10077"'
_SLICES = 12
"""A minute is simulated in this many steps of constant batch size."""


def phase_milliseconds(phase: str, batch_size: float, context: float) -> float:
    """Cost of a phase."""
    (one, one_slope), (many, many_slope) = PHASE_COSTS[phase]
    weight = (batch_size - 1) / 15
    return one + weight * (many - one) + context * (one_slope + weight * (many_slope - one_slope))


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at `start` (seconds from the beginning) and is repaired after `hours`."""

    name: str
    start: float
    hours: float
    verify: float = 1.0
    """Factor on verify."""
    everything: float = 1.0
    """Factor on all phases."""
    acceptance: float = 1.0
    """Factor on accepted tokens."""
    slow_host: float = 1.0
    """Factor on the host time of rank 1, which its gap shows too."""

    @property
    def end(self) -> float:
        """When it is repaired."""
        return self.start + self.hours * HOUR


@dataclass(frozen=True)
class Deploy:
    """At `start` the server is restarted with another configuration, whose verify costs another factor."""

    start: float
    config_id: str
    verify: float


@dataclass
class Life:
    """The plan of a simulation.

    Attributes:
        days: Its length.
        faults: What goes wrong.
        deploys: Configurations, the first at 0.
        restarts: Times of restarts with the same configuration.
        seed: Of the random numbers.

    """

    days: float
    faults: tuple[Fault, ...] = ()
    deploys: tuple[Deploy, ...] = (Deploy(0, "aaaa0001", 1.0),)
    restarts: tuple[float, ...] = ()
    seed: int = 1
    down_minutes: int = 9


@dataclass
class _Counters:
    """Counters of the two ranks; a restart begins them anew."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, series: str, amount: float) -> None:
        self.values[series] = self.values.get(series, 0.0) + amount


def _labels(rank: int, more: str = "") -> str:
    comma = "," if more else ""
    common = f'server="gpu-1:30000",model_name="m",engine_type="unified",tp_rank="{rank}",pp_rank="0",dp_rank=""'
    return f"{{{common}{comma}{more}}}"


def _cell(rank: int, size: str, more: str = "") -> str:
    comma = "," if more else ""
    return _labels(rank, f'batch_size="{size}",num_steps="3"{comma}{more}')


class Server:
    """Runs a `Life` minute by minute."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._random = random.Random(life.seed)
        self._counters = _Counters()
        self._batch = 8.0
        self._context_noise = 0.0
        self._acceptance_noise = 0.0
        self._initial()

    def minutes(self, start: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (Unix time, series with values) for every scrape; an unreachable exporter has `up` only.

        Args:
            start: Unix time of a Monday, 0 o'clock.

        """
        starts = [deploy.start for deploy in self.life.deploys if deploy.start > 0] + list(self.life.restarts)
        for minute in range(int(self.life.days * 1440)):
            now = minute * MINUTE
            down = any(0 <= now - at < self.life.down_minutes * MINUTE for at in starts)
            if down:
                self._initial()
                # The exporter is back before the model is loaded.
                up = float(any(now - at >= 2 * MINUTE for at in starts if 0 <= now - at < 3600))
                yield start + now, {f"up{{{TARGET}}}": up}
                continue
            self._minute(now)
            yield start + now, self._exposed(now)

    def _initial(self) -> None:
        self._counters = _Counters()
        add = self._counters.add
        for _, size in CELLS:
            for name in ("cycles", "timed_cycles", "gap_seconds", "drafts", "accepted_tokens", "context_tokens"):
                add(f"eagle_batch_{name}_total{_cell(0, size)}", 0.0)
            for phase in PHASE_COSTS:
                add(f"eagle_batch_phase_seconds_total{_cell(0, size, self._phase(phase))}", 0.0)

    @staticmethod
    def _phase(phase: str) -> str:
        # Two phases are enough for every rule, and the number of series is limited.
        name = phase if phase == "target_verify" else "other"
        return f'phase="{name}"'

    def _requests(self, now: float) -> float:
        """Mean number of running requests: the plan of the week."""
        day, hour = int(now // DAY) % 7, (now % DAY) / HOUR
        daily = 0.5 - 0.5 * math.cos((hour - 3) / 24 * 2 * math.pi)
        weekend = 0.45 if day >= 5 else 1.0
        if day == 6 and hour < 5:
            return 0.0
        return (3.5 + 20 * daily) * weekend

    def _minute(self, now: float) -> None:
        gauss = self._random.gauss
        life = self.life
        faults = [fault for fault in life.faults if fault.start <= now < fault.end]
        config = self._deploy(now)
        hour = (now % DAY) / HOUR
        wanted = self._requests(now)
        # Requests live for about a minute: what is random stays for a while.
        self._context_noise = 0.8 * self._context_noise + gauss(0, 0.6)
        self._acceptance_noise = 0.97 * self._acceptance_noise + gauss(0, 0.24)
        # Afternoons have longer conversations, and over a month contexts grow by a fifth.
        context_now = CONTEXT_TOKENS * (1 + 0.12 * math.sin((hour - 10) / 24 * 2 * math.pi) + 0.2 * now / (30 * DAY))
        accepted_now = ACCEPTED_PER_DRAFT * (1 + 0.04 * math.sin((hour - 5) / 24 * 2 * math.pi))
        accepted_now *= 1 + 0.02 * self._acceptance_noise
        warm = 1 + 0.015 * math.sin(now / (9.3 * HOUR))
        for _ in range(_SLICES):
            self._batch = 0.75 * self._batch + 0.25 * wanted + gauss(0, 0.25 + 0.05 * wanted)
            if wanted == 0.0:
                continue
            # Three requests at least: the smallest cell keeps the number of series down.
            batch = max(3, min(32, round(self._batch)))
            self._slice(
                batch,
                # A mean over few requests moves more.
                context_now * max(0.2, 1 + 0.35 * self._context_noise / math.sqrt(batch)),
                min(2.9, accepted_now * (1 + 0.1 * gauss(0, 1) / math.sqrt(batch))),
                config.verify * warm,
                faults,
            )

    def _slice(self, batch: int, context: float, accepted: float, verify_factor: float, faults: list[Fault]) -> None:
        gauss = self._random.gauss
        verify_fault = math.prod(fault.verify for fault in faults)
        everything = math.prod(fault.everything for fault in faults)
        slow_host = math.prod(fault.slow_host for fault in faults)
        accepted *= math.prod(fault.acceptance for fault in faults)
        milliseconds = {
            phase: phase_milliseconds(phase, batch, context) * everything * (1 + gauss(0, 0.01))
            for phase in PHASE_COSTS
        }
        milliseconds["target_verify"] *= verify_factor * verify_fault
        # The other rank waits for the slow one in the all-reduce.
        extra_host = HOST_MILLISECONDS * (slow_host - 1)
        milliseconds["target_verify"] += 0.3 * extra_host
        cycle = sum(milliseconds.values()) + GAP_MILLISECONDS + 0.4 * extra_host
        cycles = round(60_000 / _SLICES * 0.9 / cycle)
        size = next(name for bound, name in CELLS if batch <= bound)
        add = self._counters.add
        timed = round(cycles / 2)
        add(f"eagle_batch_cycles_total{_cell(0, size)}", cycles)
        add(f"eagle_batch_timed_cycles_total{_cell(0, size)}", timed)
        add(f"eagle_batch_gap_seconds_total{_cell(0, size)}", timed * GAP_MILLISECONDS / 1e3)
        add(f"eagle_batch_drafts_total{_cell(0, size)}", cycles * batch)
        add(f"eagle_batch_accepted_tokens_total{_cell(0, size)}", round(cycles * batch * accepted))
        add(f"eagle_batch_context_tokens_total{_cell(0, size)}", round(cycles * batch * context))
        for phase, value in milliseconds.items():
            add(f"eagle_batch_phase_seconds_total{_cell(0, size, self._phase(phase))}", timed * value / 1e3)
        add(f"eagle_output_tokens_total{_labels(0)}", round(cycles * batch * (1 + accepted)))
        # Rank 1 is told apart by few figures; one cell holds them all.
        add(f"eagle_batch_timed_cycles_total{_cell(1, '9-16')}", timed)
        add(
            f"eagle_batch_phase_seconds_total{_cell(1, '9-16', self._phase('target_verify'))}",
            timed * (sum(milliseconds.values()) - 0.3 * extra_host) / 1e3,
        )
        add(
            f"eagle_batch_gap_seconds_total{_cell(1, '9-16')}",
            timed * (GAP_MILLISECONDS + 0.4 * extra_host) / 1e3,
        )
        for rank, factor in ((0, 1.0), (1, slow_host)):
            add(f"eagle_cycles_total{_labels(rank)}", cycles)
            host = HOST_MILLISECONDS * factor * (1 + gauss(0, 0.03))
            add(f"eagle_phase_host_seconds_total{_labels(rank, self._phase('other'))}", timed * host / 1e3)
            bound = 0.02 if factor == 1.0 else 0.45
            add(f"eagle_host_bound_cycles_total{_labels(rank)}", round(timed * bound))

    def _deploy(self, now: float) -> Deploy:
        return [deploy for deploy in self.life.deploys if deploy.start <= now][-1]

    def _exposed(self, now: float) -> dict[str, float]:
        values = dict(self._counters.values)
        values[f"up{{{TARGET}}}"] = 1.0
        values[f"scrape_duration_seconds{{{TARGET}}}"] = 0.02
        config = f'config_id="{self._deploy(now).config_id}",overlap="true"'
        values[f"eagle_spec_config_info{_labels(0, config)}"] = 1.0
        running = max(3, round(self._batch)) if self._requests(now) else 0
        for rank in (0, 1):
            values[f"eagle_rank_up{_labels(rank, TARGET)}"] = 1.0
            values[f"eagle_running_requests{_labels(rank)}"] = running
        values[f"eagle_hook_up{_labels(0, hook('cycle'))}"] = 1.0
        values[f"eagle_timing_enabled{_labels(0, reason('on'))}"] = 1.0
        values[f"eagle_timing_enabled{_labels(0, reason('off'))}"] = 0.0
        values[f"eagle_cycles_dropped_total{_labels(0, reason('pool_exhausted'))}"] = 0.0
        # Plain decode of one token per cycle: measured in the story of this kind of server at 1.5 tokens per cycle.
        values[f"eagle_baseline_decode_seconds{_labels(0, batch('9-16'))}"] = 0.0115
        return values


def hook(name: str) -> str:
    """The label of a hook."""
    return f'hook="{name}"'


def reason(name: str) -> str:
    """The label of a reason."""
    return f'reason="{name}"'


def batch(size: str) -> str:
    """The label of a batch size."""
    return f'batch_size="{size}"'
