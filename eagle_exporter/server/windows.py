"""The breakdown of the last seconds and minutes, from differences between readings of the registry."""

from __future__ import annotations

import math
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from eagle_exporter import __version__, catalogue
from eagle_exporter.analysis.observations import Cell
from eagle_exporter.analysis.observations import Position as Acceptance
from eagle_exporter.server import models
from eagle_exporter.server.view import Life, Liveness, RankView, RegistryView, View

WINDOWS = {"10s": 10.0, "1m": 60.0, "5m": 300.0}
"""Name -> seconds."""

# Age in seconds up to which readings are kept, and how far apart: about 60 in all, whatever the traffic.
_SPACING = ((15.0, 0.0), (75.0, 4.0), (320.0, 12.0))

_ABSURD = 2.0**53
"""No counter of a sound file gets here; sums of such values would overflow."""

_COUNTERS = (
    "eagle_batch_cycles_total",
    "eagle_batch_timed_cycles_total",
    "eagle_batch_phase_seconds_total",
    "eagle_batch_gap_seconds_total",
    "eagle_batch_drafts_total",
    "eagle_batch_accepted_tokens_total",
    "eagle_output_tokens_total",
    "eagle_host_bound_cycles_total",
    "eagle_offered_tokens_per_pos_total",
    "eagle_accepted_tokens_per_pos_total",
)

_Key = tuple[str, tuple[str, ...]]
_Increase = Mapping[_Key, float]
_CellKey = tuple[str, str]
"""``batch_size``, ``num_steps``."""


@dataclass
class _Rank:
    """What is remembered of one life of a rank."""

    index: dict[_Key, int] = field(default_factory=dict)

    def pack(self, rank: RankView) -> array[float]:
        """Return the counters; series that appear later get the next places, so older arrays stay valid."""
        values = array("d", bytes(8 * len(self.index)))
        for family in rank.snapshot.families:
            if family.name not in _COUNTERS:
                continue
            for series in family.series:
                if series.value >= _ABSURD:
                    continue
                key = (family.name, series.labels)
                place = self.index.setdefault(key, len(values))
                if place == len(values):
                    values.append(series.value)
                else:
                    values[place] = series.value
        return values


@dataclass(frozen=True)
class _Reading:
    clock: float
    taken: float
    counters: dict[Life, array[float]]


class Windows:
    """Keeps readings of the last five minutes and computes the windows. Not thread-safe."""

    def __init__(self, view: RegistryView) -> None:
        """Read through `view`."""
        self._view = view
        self._readings: list[_Reading] = []
        self._ranks: dict[Life, _Rank] = {}
        self._newest: View | None = None
        self._problem: str | None = None
        self._document: bytes | None = None

    def sample(self) -> None:
        """Take a reading."""
        self._document = None
        try:
            view = self._view.read()
        except OSError as error:
            self._newest, self._problem = None, f"{self._view.root} cannot be read: {error.strerror}"
            return
        self._newest, self._problem = view, None
        shown = [rank for rank in view.ranks if rank.liveness is not Liveness.RETIRED]
        ranks = {rank.life: self._ranks.get(rank.life, _Rank()) for rank in shown}
        counters = {rank.life: ranks[rank.life].pack(rank) for rank in shown}
        self._readings = _thin([*self._readings, _Reading(view.clock, view.taken, counters)])
        self._ranks = ranks

    @property
    def readings(self) -> int:
        """Number of readings that are kept."""
        return len(self._readings)

    def document(self) -> bytes:
        """Return the breakdown as of the newest reading: a `models.Cycle` as JSON."""
        if self._document is None:
            self._document = self.cycle().model_dump_json().encode()
        return self._document

    def cycle(self) -> models.Cycle:
        """Return the breakdown as of the newest reading."""
        view = self._newest
        ranks = view.ranks if view is not None else ()
        servers = [
            self._server(name, model, list(group))
            for (name, model), group in groupby(
                ranks, lambda rank: (rank.snapshot.labels["server"], rank.snapshot.labels["model_name"])
            )
        ]
        # Running ones first: what has ended is not what somebody looks for.
        servers.sort(key=lambda server: not any(rank.up for rank in server.ranks))
        return models.Cycle(
            version=__version__,
            taken=view.taken if view is not None else time.time(),
            state=_state(view, servers),
            registry=models.Registry(
                root=str(self._view.root),
                problem=self._problem,
                files_skipped=view.skipped if view is not None else dict.fromkeys(catalogue.SKIPPED_REASONS, 0),
            ),
            servers=servers,
        )

    def _server(self, name: str, model: str, ranks: list[RankView]) -> models.Server:
        increases = {window: [self._increase(rank, seconds) for rank in ranks] for window, seconds in WINDOWS.items()}
        # Every rank of a tensor-parallel group times the same cycle, so pooling all of them would count it
        # many times.
        recording = [i for i, rank in enumerate(ranks) if _is_recording(rank)] or list(range(len(ranks)))
        running = [value for i in recording if (value := _gauge(ranks[i], "eagle_running_requests")) is not None]
        first = ranks[recording[0]]
        return models.Server(
            server=name,
            model_name=model,
            config=_info(first, "eagle_spec_config_info"),
            running_requests=_integer(sum(running)) if running else None,
            windows={
                window: _window([found for i in recording if (found := increases[window][i]) is not None])
                for window in WINDOWS
            },
            ranks=[
                _rank(
                    rank,
                    {
                        window: _window([found] if (found := increases[window][i]) is not None else [])
                        for window in WINDOWS
                    },
                )
                for i, rank in enumerate(ranks)
            ],
        )

    def _increase(self, rank: RankView, seconds: float) -> tuple[float, _Increase] | None:
        """Return the seconds covered and what was counted in them; None when nothing can be said."""
        newest = self._readings[-1] if self._readings else None
        if newest is None or rank.life not in newest.counters:
            return None
        older = [reading for reading in self._readings[:-1] if reading.clock <= newest.clock - seconds]
        base = older[-1] if older else self._readings[0]
        if rank.life not in base.counters:
            if rank.snapshot.created >= base.taken:
                # The rank began within the window, at 0.
                values = newest.counters[rank.life]
                return newest.clock - base.clock, dict(zip(self._ranks[rank.life].index, values, strict=True))
            base = next(reading for reading in self._readings if rank.life in reading.counters)
        if base is newest:
            return None
        before, after = base.counters[rank.life], newest.counters[rank.life]
        increase = {
            key: max(0.0, after[place] - (before[place] if place < len(before) else 0.0))
            for key, place in self._ranks[rank.life].index.items()
        }
        return newest.clock - base.clock, increase


def _thin(readings: list[_Reading]) -> list[_Reading]:
    """Drop readings so that older ones lie further apart, and those that no window reaches any more."""
    now = readings[-1].clock
    kept: list[_Reading] = []
    for reading in readings:
        age = now - reading.clock
        spacing = next((spacing for limit, spacing in _SPACING if age <= limit), None)
        if spacing is None:
            continue
        if not kept or reading.clock - kept[-1].clock >= spacing:
            kept.append(reading)
    return kept


def _state(view: View | None, servers: Sequence[models.Server]) -> models.State:
    if view is None:
        return models.State.UNREADABLE
    if not servers:
        return models.State.NO_RANK
    if not any(rank.up for server in servers for rank in server.ranks):
        return models.State.ALL_ENDED
    if any(server.windows["10s"].cycles for server in servers):
        return models.State.LIVE
    return models.State.NO_TRAFFIC


def _window(found: Sequence[tuple[float, _Increase]]) -> models.Window:
    """Return one window, summed over ranks."""
    seconds = max((covered for covered, _ in found), default=None)
    cells = _cells(increase for _, increase in found)
    speculating = [cell for (_, tier), cell in cells if tier != "0"]
    used = [cell for cell in speculating if cell.cycles] or [cell for (_, tier), cell in cells if tier == "0"]
    pooled = _pool(used)
    timed = sum(cell.timed_cycles for _, cell in cells)
    host_bound = _total(found, "eagle_host_bound_cycles_total")
    output = [
        (covered, increase["eagle_output_tokens_total", ()])
        for covered, increase in found
        if ("eagle_output_tokens_total", ()) in increase
    ]
    return models.Window(
        **_cost(pooled),
        seconds=seconds,
        cycles_per_second=sum(cell.cycles for _, cell in cells) / seconds if seconds else None,
        tokens_per_second=sum(tokens / covered for covered, tokens in output if covered) if output else None,
        host_bound_share=host_bound / timed if host_bound is not None and timed > 0 else None,
        positions=_positions(increase for _, increase in found),
        batch_sizes=[
            models.BatchSize(**_cost(cell), batch_size=size, num_steps=tier, tokens_per_second=cell.tokens_per_second)
            for (size, tier), cell in cells
            if cell.cycles
        ],
    )


def _cost(cell: Cell) -> dict[str, Any]:
    return {
        "cycles": round(cell.cycles),
        "timed_cycles": round(cell.timed_cycles),
        "cycle_ms": _ms(cell.cycle),
        "gap_ms": _ms(cell.gap),
        "phases": [
            models.Phase(phase=phase, ms=_ms(cell.phase(phase)), share=cell.share(phase)) for phase in catalogue.PHASES
        ],
        "verify_share": cell.share("target_verify"),
        "accept_length": cell.tokens_per_cycle,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _cells(increases: Iterable[_Increase]) -> list[tuple[_CellKey, Cell]]:
    """Return the cycles by batch size and step count, summed over ranks, in the order of batch sizes."""
    by_key: dict[_CellKey, list[Cell]] = defaultdict(list)
    for increase in increases:
        for key, cell in _rank_cells(increase).items():
            by_key[key].append(cell)
    return [(key, _pool(by_key[key], *key)) for key in sorted(by_key, key=_order)]


def _rank_cells(increase: _Increase) -> dict[_CellKey, Cell]:
    totals: dict[_CellKey, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    phases: dict[_CellKey, dict[str, float]] = defaultdict(dict)
    for (name, labels), value in increase.items():
        if name == "eagle_batch_phase_seconds_total":
            phases[labels[0], labels[1]][labels[2]] = value
        elif name.startswith("eagle_batch_"):
            totals[labels[0], labels[1]][name] = value
    return {
        key: Cell(
            batch_size=key[0],
            num_steps=_steps(key[1]),
            cycles=total["eagle_batch_cycles_total"],
            timed_cycles=total["eagle_batch_timed_cycles_total"],
            phase_seconds=phases.get(key, {}),
            gap_seconds=total.get("eagle_batch_gap_seconds_total"),
            drafts=total["eagle_batch_drafts_total"],
            accepted=total["eagle_batch_accepted_tokens_total"],
        )
        for key, total in totals.items()
    }


def _steps(tier: str) -> int | None:
    return int(tier) if tier.isascii() and tier.isdigit() else None


def _order(key: _CellKey) -> tuple[int, str, int, str]:
    size, tier = key
    place = catalogue.BATCH_SIZES.index(size) if size in catalogue.BATCH_SIZES else len(catalogue.BATCH_SIZES)
    steps = _steps(tier)
    return place, size, 1_000_000 if steps is None else steps, tier


def _pool(cells: Sequence[Cell], batch_size: str = "", tier: str = "") -> Cell:
    """Return the sum of cells: sums of numerators over sums of denominators, never a mean of means.

    A phase (or the gap) that one of the timed cells lacks is unknown in the sum.
    """
    timed = [cell for cell in cells if cell.timed_cycles > 0]
    gaps = [cell.gap_seconds for cell in timed if cell.gap_seconds is not None]
    plain = bool(cells) and all(cell.num_steps == 0 for cell in cells)
    return Cell(
        batch_size=batch_size,
        num_steps=0 if plain else _steps(tier),
        cycles=sum(cell.cycles for cell in cells),
        timed_cycles=sum(cell.timed_cycles for cell in cells),
        phase_seconds={
            phase: sum(cell.phase_seconds[phase] for cell in timed)
            for phase in catalogue.PHASES
            if timed and all(phase in cell.phase_seconds for cell in timed)
        },
        gap_seconds=sum(gaps) if gaps and len(gaps) == len(timed) else None,
        drafts=sum(cell.drafts for cell in cells),
        accepted=sum(cell.accepted for cell in cells),
    )


def _total(found: Sequence[tuple[float, _Increase]], name: str) -> float | None:
    values = [increase[name, ()] for _, increase in found if (name, ()) in increase]
    return sum(values) if values else None


def _positions(increases: Iterable[_Increase]) -> list[models.Position]:
    offered: dict[int, float] = defaultdict(float)
    accepted: dict[int, float] = defaultdict(float)
    for increase in increases:
        for (name, labels), value in increase.items():
            if name == "eagle_offered_tokens_per_pos_total" and labels[0].isdigit():
                offered[int(labels[0])] += value
            elif name == "eagle_accepted_tokens_per_pos_total" and labels[0].isdigit():
                accepted[int(labels[0])] += value
    return [
        models.Position(
            position=position,
            offered=round(offered[position]),
            accepted=round(accepted[position]),
            rate=Acceptance(offered[position], accepted[position]).rate,
        )
        for position in sorted(offered)
    ]


def _rank(rank: RankView, windows: dict[str, models.Window]) -> models.Rank:
    labels = rank.snapshot.labels
    hooks = _family(rank, "eagle_hook_up")
    timing = _info(rank, "eagle_timing_info") or {}
    gpu = _info(rank, "eagle_gpu_info") or {}
    states = [state for state, value in _family(rank, "eagle_timing_enabled").items() if value == 1]
    stopped = bool(set(states) & set(catalogue.STOPPED_STATES))
    return models.Rank(
        engine_type=labels["engine_type"],
        tp_rank=labels["tp_rank"],
        pp_rank=labels["pp_rank"],
        dp_rank=labels["dp_rank"],
        up=rank.liveness is Liveness.ALIVE,
        recording=_is_recording(rank),
        running_requests=_integer(_gauge(rank, "eagle_running_requests")),
        num_steps=_integer(_gauge(rank, "eagle_spec_num_steps")),
        num_draft_tokens=_integer(_gauge(rank, "eagle_spec_num_draft_tokens")),
        # Stopped, every hook is down: the header still says which of them could not be attached.
        hooks_down=[
            hook for hook, value in hooks.items() if value == 0 and (not stopped or hook in rank.snapshot.hook_problems)
        ],
        timing_state=states[0] if states else None,
        clock=timing.get("clock"),
        gpu=gpu.get("name"),
        started=_finite(rank.snapshot.value("eagle_rank_start_timestamp_seconds")),
        last_cycle=_finite(rank.snapshot.value("eagle_last_cycle_timestamp_seconds")),
        windows=windows,
    )


def _is_recording(rank: RankView) -> bool:
    return rank.snapshot.family("eagle_batch_drafts_total") is not None


def _integer(value: float | None) -> int | None:
    # A file may say anything, also 1e300 or infinity; what is no count is not known.
    return int(value) if value is not None and 0 <= value < _ABSURD else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _gauge(rank: RankView, name: str) -> float | None:
    """Return a gauge; None for an ended rank, whose gauges are gone."""
    return rank.snapshot.value(name) if rank.liveness is Liveness.ALIVE else None


def _family(rank: RankView, name: str) -> dict[str, float]:
    """Return the one-label series of a gauge of a living rank."""
    family = rank.snapshot.family(name) if rank.liveness is Liveness.ALIVE else None
    return {series.labels[0]: series.value for series in family.series} if family is not None else {}


def _info(rank: RankView, name: str) -> dict[str, str] | None:
    family = rank.snapshot.family(name) if rank.liveness is Liveness.ALIVE else None
    if family is None:
        return None
    current = next((series for series in family.series if series.value == 1), None)
    return dict(zip(family.labels, current.labels, strict=True)) if current is not None else None
