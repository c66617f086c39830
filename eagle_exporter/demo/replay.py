"""Plays recorded GPU cycles through the real recorder into the real registry: no GPU, no SGLang.

`ReplayServer` is a server's ranks in this process, `traffic` the order in which recorded bursts follow each other,
`Replay` a process that plays them in real time, and `write_cycles` writes many at once. A process never sees the
record locks that it holds itself, so whoever wants ranks that are alive uses `Replay`; all ranks of a server live in
its one process. Run as a program, this is that process.

Ranks that were recorded show their times as they are. Further ranks take their places in turn and are derived from
them: the all-reduce of tensor parallelism makes their device times equal but for a twentieth of a percent, their host
times and gaps differ a little.
What the recording does not hold is not made up: prefill times, KV allocation and the draft model's memory stay at 0
or absent. ``eagle_hook_host_seconds_total`` is the time that the recorder really takes here.

`Faults` are deviations from the recording that can be planted while it plays.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue, settings
from eagle_exporter.demo import recording as recordings
from eagle_exporter.demo.recording import Group, RankTimes, RecordedCycle, Recording, RecordingError
from eagle_exporter.registry.layout import Layout, RankPlan, file_name
from eagle_exporter.registry.writer import RankWriter, RegistryError, clear_stale_files, server_directory
from eagle_exporter.timing.cycle import (
    DRAFT_STEPS,
    VERIFY_OVERHEAD,
    Acceptance,
    CycleRecord,
    PhaseTimes,
)
from eagle_exporter.timing.recorder import RankRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

SERVER_NAME = "replay"
MAX_RANKS = 64
MAX_NUM_STEPS = 16

_DEVICE_NOISE = 0.0005
_HOST_SPREAD = 0.04
_HOST_NOISE = 0.02
_COMMIT_SECONDS = 0.02
_FAULTS_FILE_SECONDS = 0.1
_IDLE_SECONDS = 0.1
_BEHIND_SECONDS = 1.0
_START_SECONDS = 30.0


class ReplayError(Exception):
    """The replay cannot go on; the message says why."""


# --- planted faults --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Faults:
    """Deviations from the recording.

    Attributes:
        phase_factors: Phase -> how many times longer it takes on the device of every rank. The host times stay.
        acceptance_factor: How many times more (or fewer) draft tokens are accepted, at most all of them.
        slow_rank: A rank whose host is slow, None for none. Its host times grow by `host_factor`; where its host then
            needs longer than cycle and gap together, its GPU waits in a longer gap, the cycle counts as host-bound,
            and the other ranks wait for it in their first collective of the cycle, in the draft's first forward.
        host_factor: How many times longer the slow rank's host takes.
        idle: No request runs.
        dead_ranks: Ranks whose process has ended. A rank that is to live again takes a restart of all.
        num_steps: Draft steps after a restart, None for those of the recording. The times of another step count are
            a synthesis: the draft phase in proportion to its forwards, everything else as recorded.
    """

    phase_factors: Mapping[str, float] = field(default_factory=dict)
    acceptance_factor: float = 1.0
    slow_rank: int | None = None
    host_factor: float = 2.0
    idle: bool = False
    dead_ranks: tuple[int, ...] = ()
    num_steps: int | None = None

    @classmethod
    def parse(cls, data: Any) -> Faults:
        """Check what came as JSON: an object with any of the attributes.

        Raises:
            ReplayError: Something in it is wrong; the message names it.
        """
        if not isinstance(data, dict):
            raise ReplayError("a JSON object expected")
        unknown = sorted(set(data) - {entry.name for entry in fields(cls)})
        if unknown:
            raise ReplayError(f"there is no {', '.join(unknown)}")
        values: dict[str, Any] = dict(data)
        if "phase_factors" in values:
            factors = values["phase_factors"]
            if not isinstance(factors, dict):
                raise ReplayError("phase_factors: an object {phase: factor} expected")
            for phase in factors:
                if phase not in catalogue.PHASES:
                    raise ReplayError(f"phase_factors: {phase!r} is none of {', '.join(catalogue.PHASES)}")
            values["phase_factors"] = {phase: _factor(phase, value) for phase, value in factors.items()}
        for name in ("acceptance_factor", "host_factor"):
            if name in values:
                values[name] = _factor(name, values[name])
        if "slow_rank" in values and values["slow_rank"] is not None:
            values["slow_rank"] = _whole("slow_rank", values["slow_rank"], 0, MAX_RANKS - 1)
        if "num_steps" in values and values["num_steps"] is not None:
            values["num_steps"] = _whole("num_steps", values["num_steps"], 1, MAX_NUM_STEPS)
        if "dead_ranks" in values:
            if not isinstance(values["dead_ranks"], (list, tuple)):
                raise ReplayError("dead_ranks: a list expected")
            values["dead_ranks"] = tuple(_whole("dead_ranks", rank, 0, MAX_RANKS - 1) for rank in values["dead_ranks"])
        if not isinstance(values.get("idle", False), bool):
            raise ReplayError("idle: true or false expected")
        return cls(**values)


NO_FAULTS = Faults()


def _factor(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1000:
        raise ReplayError(f"{name}: {value!r} is no factor between 0 and 1000")
    return float(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ReplayError(f"{name}: {value!r} is no number from {low} to {high}")
    return value


# --- the ranks -------------------------------------------------------------------------------------------
@dataclass
class _Rank:
    number: int
    recorded: int
    """The recorded rank whose times it shows."""
    recorder: RankRecorder
    host_factor: float
    host_cost: float = 0.0


class ReplayServer:
    """The ranks of one replayed server, in this process.

    Attributes:
        recording: What is played.
        directory: The server's directory in the registry.
        num_steps: Draft steps in force.
        ranks: How many ranks there are, dead ones included.
    """

    def __init__(
        self,
        root: Path,
        recording: Recording,
        *,
        server: str = SERVER_NAME,
        ranks: int = 1,
        seed: int = 0,
        num_steps: int | None = None,
        dead_ranks: Sequence[int] = (),
    ) -> None:
        """Clear what an earlier life left, and create the files of all ranks, as a server does that starts.

        Args:
            root: The registry root.
            recording: What is played.
            server: The server's name.
            ranks: Tensor-parallel ranks; rank 0 counts acceptance.
            seed: Of the differences between ranks, and of the rounding of a scaled acceptance.
            num_steps: Draft steps, None for those of the recording; see `Faults.num_steps`.
            dead_ranks: Ranks that never come up.

        Raises:
            RegistryError: The registry cannot be used, or the same server runs already.
            SettingError: An ``EAGLE_EXPORTER_*`` variable has a value that cannot be used.
        """
        self.recording = recording
        self.ranks = ranks
        self.num_steps = recording.run.num_steps if num_steps is None else num_steps
        if self.num_steps == recording.run.num_steps:
            self.num_draft_tokens = recording.run.num_draft_tokens
        else:
            self.num_draft_tokens = self.num_steps + 1
        self._random = random.Random(f"noise {seed}")  # noqa: S311 - no secret
        self._rounding = random.Random(f"acceptance {seed}")  # noqa: S311
        self._idle = True
        configured = settings.read(strict=True)
        self.directory = server_directory(root, server, group=configured.group)
        clear_stale_files(self.directory)
        self._alive: list[_Rank] = []
        try:
            for number in range(ranks):
                if number not in dead_ranks:
                    recorder = self._start_rank(number, server, configured)
                    derived = number >= recording.ranks
                    spread = self._random.uniform(-_HOST_SPREAD, _HOST_SPREAD) if derived else 0.0
                    self._alive.append(_Rank(number, number % recording.ranks, recorder, 1.0 + spread))
        except BaseException:
            self.close()
            raise

    def _start_rank(self, number: int, server: str, configured: settings.Settings) -> RankRecorder:
        run = self.recording.run
        hooks = dict.fromkeys(catalogue.HOOKS, True)
        has_steps = any(cycle.steps for group in self.recording.groups for cycle in group.cycles)
        infos = _infos(self.recording, self.num_steps, self.num_draft_tokens, number, self.ranks)
        infos["eagle_timing_info"] = ("cuda_event", "graph_events" if has_steps else "none", "1")
        values = (server, f"replay:{run.model}", "unified", str(number), "0", "")
        plan = RankPlan(
            labels=dict(zip(catalogue.COMMON_LABELS, values, strict=True)),
            recording=number == 0,
            histograms=number == 0 or configured.histograms == "all",
            num_steps_tiers=(self.num_steps,),
            hooks=hooks,
            clock="cuda_event",
            duration_buckets=configured.buckets,
            infos={name: [labels] for name, labels in infos.items()},
            baseline_batch_sizes=tuple(configured.baseline),
        )
        writer = RankWriter(self.directory / file_name(number, 0, None), Layout(plan), group=configured.group, hooks={})
        recorder = RankRecorder(writer)
        for size, seconds in configured.baseline.items():
            recorder.set_gauge("eagle_baseline_decode_seconds", seconds, size)
        if run.kv_pool_tokens is not None:
            recorder.set_gauge("eagle_kv_pool_tokens", run.kv_pool_tokens)
        recorder.set_gauge("eagle_spec_num_steps", self.num_steps)
        recorder.set_gauge("eagle_spec_num_draft_tokens", self.num_draft_tokens)
        recorder.set_running_requests(0)
        recorder.start(hooks, "on")
        return recorder

    @property
    def dead_ranks(self) -> set[int]:
        """Ranks whose file nobody holds."""
        return set(range(self.ranks)) - {rank.number for rank in self._alive}

    def play(self, recorded: RecordedCycle, faults: Faults = NO_FAULTS) -> float:
        """Count one cycle on every rank that lives, without publishing it; returns the seconds it takes."""
        self._idle = False
        accepted: Sequence[int] = recorded.accepted
        if self.num_steps != self.recording.run.num_steps:
            accepted = [min(count, self.num_steps) for count in accepted]
        if faults.acceptance_factor != 1.0:
            accepted = [self._scale(count, faults.acceptance_factor) for count in accepted]
        # As long as it takes on the first rank: the ranks of a group run in step.
        took = sum(self._device_times(recorded, faults)[0]) + (recorded.gap or 0.0)
        waiting = 0.0
        if faults.slow_rank is not None and faults.slow_rank < self.ranks:
            slow = recorded.rank(faults.slow_rank % self.recording.ranks)
            if slow.gap is not None:
                waiting = max(0.0, sum(slow.host) * faults.host_factor - took)
        for rank in self._alive:
            begin = time.perf_counter()
            self._play_on(rank, recorded, accepted, faults, waiting)
            rank.host_cost += time.perf_counter() - begin
        return took + waiting

    def _device_times(
        self, recorded: RankTimes, faults: Faults
    ) -> tuple[list[float], Sequence[float], Sequence[float] | None]:
        """Return the seconds of the phases, the draft forwards and the parts of the verify overhead on one rank."""
        phases = list(recorded.phases)
        forwards: Sequence[float] = recorded.steps
        parts = recorded.parts
        steps = self.num_steps
        if steps != self.recording.run.num_steps:
            share = (steps - 1) / max(1, self.recording.run.num_steps - 1)
            phases[DRAFT_STEPS] *= share
            forwards = [sum(forwards) / len(forwards)] * (steps - 1) if forwards else ()
        if faults.phase_factors:
            factors = [faults.phase_factors.get(phase, 1.0) for phase in catalogue.PHASES]
            phases = [seconds * factor for seconds, factor in zip(phases, factors, strict=True)]
            forwards = [seconds * factors[DRAFT_STEPS] for seconds in forwards]
            parts = None if parts is None else tuple(part * factors[VERIFY_OVERHEAD] for part in parts)
        return phases, forwards, parts

    def _play_on(
        self, rank: _Rank, cycle: RecordedCycle, accepted: Sequence[int], faults: Faults, waiting: float
    ) -> None:
        recorded = cycle.rank(rank.recorded)
        phases, forwards, parts = self._device_times(recorded, faults)
        device, host, gap = 1.0, 1.0, recorded.gap
        if rank.number >= self.recording.ranks:
            device += self._random.uniform(-_DEVICE_NOISE, _DEVICE_NOISE)
            host = rank.host_factor * (1.0 + self._random.uniform(-_HOST_NOISE, _HOST_NOISE))
            gap = None if gap is None else gap * host
        times = [seconds * device for seconds in phases]
        record = CycleRecord(cycle.rows, self.num_steps, self.num_draft_tokens)
        record.timed = True
        record.host_bound = recorded.host_bound
        if rank.number == faults.slow_rank:
            host *= faults.host_factor
            if waiting and gap is not None:
                gap += waiting
                record.host_bound = True
        elif waiting:
            times[DRAFT_STEPS] += waiting
            forwards = [forwards[0] + waiting, *forwards[1:]] if forwards else forwards
        rank.recorder.add_cycle(
            record,
            Acceptance(accepted, cycle.context, cycle.wasted),
            PhaseTimes(
                cycle=sum(times),
                phases=times,
                host=[seconds * host for seconds in recorded.host],
                parts=None if parts is None else [part * device for part in parts],
                steps=[seconds * device for seconds in forwards],
                gap=gap,
            ),
        )
        rank.recorder.add_output_tokens(sum(accepted) + len(accepted))
        rank.recorder.set_running_requests(len(accepted))

    def _scale(self, count: int, factor: float) -> int:
        scaled = count * factor
        whole = math.floor(scaled)
        return min(self.num_steps, whole + (self._rounding.random() < scaled - whole))

    def idle(self) -> None:
        """Let no request run; the overlap loop ends with a cycle that has no live row."""
        if self._idle:
            return
        self._idle = True
        for rank in self._alive:
            record = CycleRecord(1, self.num_steps, self.num_draft_tokens)
            rank.recorder.add_cycle(record, Acceptance(wasted_rows=1, excluded="no_live_row"), None)
            rank.recorder.set_running_requests(0)

    def commit(self) -> None:
        """Publish what was counted."""
        for rank in self._alive:
            rank.recorder.add_host_cost(rank.host_cost)
            begin = time.perf_counter()
            rank.recorder.commit()
            rank.host_cost = time.perf_counter() - begin

    def end_ranks(self, numbers: Sequence[int]) -> None:
        """Give up the files of some ranks, as if their processes had ended."""
        for rank in self._alive:
            if rank.number in numbers:
                rank.recorder.writer.close()
        self._alive = [rank for rank in self._alive if rank.number not in numbers]

    def close(self) -> None:
        """Give up the files of all ranks."""
        self.end_ranks(range(self.ranks))


def _infos(
    recording: Recording, num_steps: int, num_draft_tokens: int, rank: int, ranks: int
) -> dict[str, tuple[str, ...]]:
    """Return the label values of the info families: what the recording knows, and "" for the rest."""
    run = recording.run
    infos = {
        "eagle_nccl_config_info": ("", *("" for _ in catalogue.NCCL_VARIABLES)),
        "eagle_allreduce_config_info": tuple("" for _ in catalogue.ALLREDUCE_LABELS),
        # The card of the recording stands for every rank; an identity that cannot be taken for a card's.
        "eagle_gpu_info": (str(rank), f"GPU-replay-{rank}", "", run.gpu),
    }
    facts = {
        "algorithm": "EAGLE3",
        "hook_family": run.hook_family,
        "num_steps": str(num_steps),
        "topk": str(run.topk),
        "num_draft_tokens": str(num_draft_tokens),
        "adaptive": "false",
        "attention_backend": run.attention_backend,
        "draft_attention_backend": "",
        "overlap": "true",
        "cuda_graph": "true",
        "tp_size": str(ranks),
        "pp_size": "1",
        "dp_size": "1",
        "ep_size": "1",
        "page_size": str(run.page_size),
        "draft_model": f"replay:{run.model}-eagle3",
        "sglang_version": run.sglang,
        "torch_version": run.torch,
    }
    hashed = json.dumps({**facts, "model": run.model, "gpu": run.gpu}, sort_keys=True)
    facts["config_id"] = hashlib.sha256(hashed.encode()).hexdigest()[:8]
    infos["eagle_spec_config_info"] = tuple(facts[label] for label in catalogue.SPEC_CONFIG_LABELS)
    return infos


# --- the order of cycles ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pause:
    """No request runs for a while.

    Attributes:
        seconds: How long.
    """

    seconds: float


def traffic(recording: Recording, *, seed: int = 0, batches: Sequence[int] | None = None) -> Iterator[Group | Pause]:
    """Yield bursts of requests and pauses without end: the batch walks up and down among the recorded ones.

    A burst is a whole recorded group, so that within it every cycle follows the one it was recorded after.

    Args:
        recording: Where the groups come from.
        seed: The same seed yields the same order.
        batches: Only groups of these batches; None for all.

    Raises:
        ReplayError: A batch is not in the recording.
    """
    groups = [group for group in recording.groups if batches is None or group.batch in batches]
    missing = sorted(set(batches or ()) - {group.batch for group in groups})
    if missing or not groups:
        known = ", ".join(str(group.batch) for group in recording.groups)
        raise ReplayError(f"batch {', '.join(map(str, missing)) or 'none'} is not in the recording ({known})")
    return _walk(groups, random.Random(f"traffic {seed}"))  # noqa: S311


def _walk(groups: Sequence[Group], order: random.Random) -> Iterator[Group | Pause]:
    position = order.randrange(len(groups))
    while True:
        for _ in range(order.randint(1, 3)):
            yield groups[position]
        if order.random() < 0.2:
            yield Pause(order.uniform(0.3, 2.0))
        if len(groups) > 1:
            step = order.choice((-1, 1))
            if not 0 <= position + step < len(groups):
                step = -step
            position += step


class Player:
    """Plays traffic on a server; restarts the server where a fault asks for it.

    Attributes:
        server: The server, another object after a restart.
        faults: What deviates from the recording now; `plant` changes it.
    """

    def __init__(
        self,
        root: Path,
        recording: Recording,
        *,
        server: str = SERVER_NAME,
        ranks: int = 1,
        seed: int = 0,
        batches: Sequence[int] | None = None,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """Start the server (see `ReplayServer` and `traffic`)."""
        self._root = root
        self._recording = recording
        self._options: dict[str, Any] = {"server": server, "ranks": ranks, "seed": seed}
        self._traffic = traffic(recording, seed=seed, batches=batches)
        self._cycles: Iterator[RecordedCycle] = iter(())
        self.faults = faults
        self.server = self._start()

    def _start(self) -> ReplayServer:
        return ReplayServer(
            self._root,
            self._recording,
            num_steps=self.faults.num_steps,
            dead_ranks=self.faults.dead_ranks,
            **self._options,
        )

    def restart(self) -> None:
        """Let the server's processes end and start again: all files are new, all counters 0."""
        self.server.close()
        self.server = self._start()

    def plant(self, faults: Faults) -> None:
        """Deviate from the recording from now on."""
        before, self.faults = self.faults, faults
        dead = self.server.dead_ranks
        if faults.num_steps != before.num_steps or dead - set(faults.dead_ranks):
            self.restart()
        else:
            self.server.end_ranks(faults.dead_ranks)

    def play(self) -> float:
        """Play the next cycle, or begin a pause; returns the seconds it takes."""
        if self.faults.idle:
            self.server.idle()
            return _IDLE_SECONDS
        recorded = next(self._cycles, None)
        while recorded is None:
            burst = next(self._traffic)
            if isinstance(burst, Pause):
                self.server.idle()
                return burst.seconds
            self._cycles = iter(burst.cycles)
            recorded = next(self._cycles, None)
        return self.server.play(recorded, self.faults)

    def play_cycles(self, count: int) -> float:
        """Play `count` cycles at once, without pauses, and publish them; returns the seconds they would take."""
        took = 0.0
        for _ in range(count):
            recorded = next(self._cycles, None)
            while recorded is None:
                burst = next(self._traffic)
                if isinstance(burst, Group):
                    self._cycles = iter(burst.cycles)
                    recorded = next(self._cycles, None)
            took += self.server.play(recorded, self.faults)
        self.server.commit()
        return took


def write_cycles(
    root: Path,
    count: int,
    *,
    ranks: int = 1,
    server: str = SERVER_NAME,
    seed: int = 0,
    batches: Sequence[int] | None = None,
    faults: Faults = NO_FAULTS,
    recording: Path | None = None,
) -> Player:
    """Write `count` cycles into a registry as fast as this machine can, some 10,000 a second.

    The files are held by this process until ``server.close()`` of the result. A reader in the same process cannot see
    that, and takes the ranks for dead; one that shall see them alive needs `Replay.cycles`.

    Args:
        root: The registry root.
        count: Cycles on every rank.
        ranks: Tensor-parallel ranks.
        server: The server's name.
        seed: Of the order of cycles.
        batches: Only recorded groups of these batches; None for all.
        faults: What deviates from the recording.
        recording: Another recording than the one in the package (`recording.shipped`).
    """
    loaded = recordings.load(recording or recordings.shipped(ranks))
    player = Player(root, loaded, server=server, ranks=ranks, seed=seed, batches=batches, faults=faults)
    player.play_cycles(count)
    return player


# --- the process -----------------------------------------------------------------------------------------
class _Process:
    """Plays in real time; obeys commands on standard input and the content of a faults file."""

    def __init__(self, player: Player, speed: float, faults_file: Path | None, commands: bool) -> None:
        self._player = player
        self._speed = speed
        self._faults_file = faults_file
        self._faults_text: str | None = None
        self._commands = commands

    def run(self) -> None:
        """Play until standard input ends, or for ever without commands."""
        due = looked = time.monotonic()
        published = -math.inf
        longest = math.inf if self._faults_file is None else _FAULTS_FILE_SECONDS
        while True:
            now = time.monotonic()
            if self._faults_file is not None and now - looked >= _FAULTS_FILE_SECONDS:
                looked = now
                self._look_at_faults_file(self._faults_file)
            ahead = due - now if self._speed > 0 else math.inf
            if ahead > 0 or now - published > _COMMIT_SECONDS:
                self._player.server.commit()
                published = now
                if not self._wait(max(0.0, min(ahead, longest))):
                    return
                now = time.monotonic()
            if self._speed == 0 or now < due:
                continue
            if now - due > _BEHIND_SECONDS:  # suspended, or asked for more than this machine can do
                due = now
            due += self._player.play() / self._speed

    def _wait(self, seconds: float) -> bool:
        """Obey commands for so long; False when there will be no more."""
        deadline = time.monotonic() + seconds
        if not self._commands:
            time.sleep(min(seconds, 3600.0))
            return True
        while True:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([sys.stdin], [], [], None if left == math.inf else max(0.0, left))
            if ready:
                line = sys.stdin.readline()
                if not line:
                    return False
                self._obey(line)
            if deadline <= time.monotonic():
                return True

    def _obey(self, line: str) -> None:
        try:
            command = json.loads(line)
            do = command["do"]
            if do == "faults":
                self._player.plant(Faults.parse(command["faults"]))
            elif do == "cycles":
                self._player.play_cycles(command["count"])
            elif do == "restart":
                self._player.restart()
            else:
                raise ReplayError(f"there is no command {do!r}")
            self._player.server.commit()
            answer = "done"
        except (ReplayError, RegistryError) as error:
            answer = f"error: {error}".replace("\n", " ")
        print(answer, flush=True)

    def _look_at_faults_file(self, path: Path) -> None:
        try:
            text = path.read_text()
        except OSError:
            text = ""  # no file, no faults
        if text == self._faults_text:
            return
        self._faults_text = text
        try:
            self._player.plant(Faults.parse(json.loads(text) if text.strip() else {}))
        except (ReplayError, RegistryError, ValueError) as error:
            print(f"{path}: {error}; nothing changes", file=sys.stderr, flush=True)


class Replay:
    """A process that plays a recording in real time; its ranks are alive. Use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        ranks: int = 1,
        server: str = SERVER_NAME,
        speed: float = 1.0,
        seed: int = 0,
        *,
        batches: Sequence[int] | None = None,
        faults: Faults = NO_FAULTS,
        recording: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; the process starts on entry.

        Args:
            directory: The registry root.
            ranks: Tensor-parallel ranks.
            server: The server's name.
            speed: How many times faster than recorded cycles follow each other; their times stay as recorded. With 0
                only what `cycles` asks for is played.
            seed: Of the order of cycles.
            batches: Only recorded groups of these batches; None for all.
            faults: What deviates from the recording from the start.
            recording: Another recording than the one in the package (`recording.shipped`).
            environment: More environment variables, for example ``EAGLE_EXPORTER_HISTOGRAMS``.
        """
        self.faults = faults
        self._command = command(
            directory,
            ranks=ranks,
            server=server,
            speed=speed,
            seed=seed,
            batches=batches,
            recording=recording,
        )
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process; returns when the files are there.

        Raises:
            ReplayError: It did not start; the message says why.
        """
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [*self._command, "--commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **self._environment},
        )
        try:
            self._answer("start")
            if self.faults != NO_FAULTS:
                self.plant(self.faults)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Process id of the process that holds the files."""
        return self._running().pid

    def plant(self, faults: Faults) -> None:
        """Deviate from the recording from now on; ``Faults()`` ends it. Returns when it is in force."""
        self._tell("faults", faults=asdict(faults))
        self.faults = faults

    def change(self, **values: Any) -> None:
        """Change some of the faults (names as in `Faults`) and leave the others."""
        self.plant(replace(self.faults, **values))

    def cycles(self, count: int) -> None:
        """Play `count` cycles at once; returns when they are published."""
        self._tell("cycles", count=count)

    def restart(self) -> None:
        """Let the server end and start again, with new files."""
        self._tell("restart")

    def kill(self) -> None:
        """End the process with SIGKILL, as the out-of-memory killer would; its files stay."""
        process = self._running()
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End the process; its files stay, as those of a real server do."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ReplayError("the replay is not running")
        return self._process

    def _tell(self, do: str, **arguments: Any) -> None:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise ReplayError(f"{do}: the replay has ended") from error
        self._answer(do)

    def _answer(self, to: str) -> None:
        process = self._running()
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        if answer != "done":
            raise ReplayError(f"{to}: {answer.removeprefix('error: ') or 'the replay has ended'}")


def command(
    root: Path,
    *,
    ranks: int = 1,
    server: str = SERVER_NAME,
    speed: float = 1.0,
    seed: int = 0,
    batches: Sequence[int] | None = None,
    recording: Path | None = None,
    faults_file: Path | None = None,
) -> list[str]:
    """Return the command line of a replaying process."""
    line = [sys.executable, "-m", "eagle_exporter.demo.replay", "--dir", str(root), "--server", server]
    line += ["--ranks", str(ranks), "--speed", str(speed), "--seed", str(seed)]
    if batches is not None:
        line += ["--batches", ",".join(map(str, batches))]
    if recording is not None:
        line += ["--recording", str(recording)]
    if faults_file is not None:
        line += ["--faults", str(faults_file)]
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Be the replaying process; returns the exit code: 0, or 1 when it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m eagle_exporter.demo.replay", description="Plays a recording.")
    parser.add_argument("--dir", type=Path, required=True, help="registry root")
    parser.add_argument("--server", default=SERVER_NAME)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--recording", type=Path, help="default: the one in the package for that number of ranks")
    parser.add_argument("--faults", type=Path, help="JSON file with faults, looked at while it plays")
    parser.add_argument("--commands", action="store_true", help="obey standard input and end with it")
    args = parser.parse_args(arguments)
    if not 1 <= args.ranks <= MAX_RANKS or not 0 <= args.speed < math.inf:
        parser.error(f"ranks from 1 to {MAX_RANKS} and a speed from 0 expected")
    try:
        player = Player(
            args.dir,
            recordings.load(args.recording or recordings.shipped(args.ranks)),
            server=args.server,
            ranks=args.ranks,
            seed=args.seed,
            batches=args.batches,
        )
    except (ReplayError, RegistryError, RecordingError, settings.SettingError) as error:
        print(f"error: {error}".replace("\n", " ") if args.commands else f"replay: {error}", flush=True)
        return 1
    print("done" if args.commands else "playing", flush=True)
    try:
        _Process(player, args.speed, args.faults, args.commands).run()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
