"""Recorded GPU cycles: the file format, its loader, and the conversion of what the GPU run writes.

A recording is JSON, usually gzipped, by columns so that it stays small::

    {
      "format": "eagle-exporter recording",
      "version": 1,
      "description": what it is, for people,
      "run": {gpu, sglang, torch, model, num_steps, topk, num_draft_tokens, and more},
      "baseline": {"decode_seconds": {batch size label: seconds, ...}, "source": how it was measured},
      "groups": [{"batch": requests sent together, "columns": {...}, "other_ranks": [{...}, ...]}, ...]
    }

``run`` are the facts of the whole run (`Run`); ``model`` becomes ``model_name="replay:..."``. ``baseline`` is
there where decode steps without speculation were measured with the same model on the same GPU model. A group is one
burst of requests from its first decode cycle to its last, its cycles in the order of their launch. Every column
has one entry per cycle; all times are whole nanoseconds:

    rows        requests launched
    accepted    for each live row the accepted draft tokens, without the bonus
    context     for each live row its tokens before the cycle
    wasted      rows whose request had finished; the live rows and these are all rows
    host_bound  true, false, or null where it is not known
    gap         from the end of the preceding cycle, null where none preceded
    steps       for each draft forward its time; empty where not known
    parts       the parts of the verify overhead, in the order of the catalogue; null where not measured
    phases      {phase: column} of device times; the cycle is their sum
    host        {phase: column} of times of the scheduler thread

``columns`` are those of the first rank. ``other_ranks`` is there where several tensor-parallel ranks were recorded: for
each further rank, in the order of their numbers, its own ``host_bound``, ``gap``, ``steps``, ``parts``, ``phases`` and
``host`` of the same cycles. All groups hold the same number of ranks.

A reader ignores keys it does not know and refuses another version. To convert the list of groups that a GPU run
writes: ``python -m eagle_exporter.demo.recording RAW.json.gz OUT.json.gz``.

Two recordings are in the package (`shipped`): one of a single GPU, and one of two with tensor parallelism. Only the
first has a baseline: a decode step of one GPU says nothing about what speculation is worth on two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FORMAT = "eagle-exporter recording"
VERSION = 1
DEFAULT_RECORDING = Path(__file__).parent / "recording_h200.json.gz"
RANKS_RECORDING = Path(__file__).parent / "recording_h200_tp2.json.gz"
_DESCRIPTION = (
    "Decode cycles of SGLang with EAGLE-3, CUDA graphs and the overlap scheduler on {where}, as the exporter's own "
    "hooks timed them; batches of requests sent together, each from its first decode cycle to its last"
)

_NANOSECOND = 1e-9
_LONGEST_NANOSECONDS = 3_600_000_000_000
_CLOSURE_SECONDS = 1e-6
_PAUSE = 100
"""So many times the median gap is no ordinary one."""
_PARTS = len(catalogue.VERIFY_OVERHEAD_PARTS)


class RecordingError(ValueError):
    """A recording cannot be used; the message names the file, the place in it, and what is wrong."""


@dataclass(frozen=True)
class Run:
    """Facts of the run that was recorded.

    Attributes:
        gpu: Name of the GPU.
        sglang: Version of SGLang.
        torch: Version of PyTorch.
        model: Short name of the model.
        num_steps: Draft steps.
        topk: Width of the draft tree.
        num_draft_tokens: Tokens verified per request and cycle.
        attention_backend: As ``eagle_spec_config_info`` shows it, empty when not known.
        hook_family: Hook point family that took the times.
        page_size: Tokens in a page of the KV cache.
        kv_pool_tokens: Capacity of the KV cache, None when not known.
    """

    gpu: str
    sglang: str
    torch: str
    model: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    attention_backend: str = ""
    hook_family: str = "v2"
    page_size: int = 1
    kv_pool_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank measured in a decode cycle; the names mean what they mean in the file, times are in seconds.

    Attributes:
        host_bound: The GPU waited for the host; None where it is not known.
        phases: Device time of each phase of the catalogue.
        host: Scheduler-thread time of each.
        gap: From the end of the preceding cycle, None where none preceded.
        steps: Time of each draft forward, empty where not known.
        parts: Parts of the verify overhead, None where not measured.
    """

    host_bound: bool | None
    phases: tuple[float, ...]
    host: tuple[float, ...]
    gap: float | None
    steps: tuple[float, ...]
    parts: tuple[float, ...] | None

    @property
    def cycle(self) -> float:
        """Duration of the cycle: its phases' sum."""
        return sum(self.phases)


@dataclass(frozen=True, slots=True)
class RecordedCycle(RankTimes):
    """One decode cycle, with the times of its first rank.

    Attributes:
        rows: Requests launched.
        accepted: Accepted draft tokens of each live row.
        context: Tokens of each live row before the cycle.
        wasted: Rows whose request had finished.
        other_ranks: Times of the further ranks that were recorded.
    """

    rows: int
    accepted: tuple[int, ...]
    context: tuple[int, ...]
    wasted: int
    other_ranks: tuple[RankTimes, ...] = ()

    def rank(self, number: int) -> RankTimes:
        """Return the times of a recorded rank."""
        return self.other_ranks[number - 1] if number else self


@dataclass(frozen=True)
class Group:
    """One burst of requests.

    Attributes:
        batch: Requests sent together.
        cycles: In the order of their launch.
    """

    batch: int
    cycles: tuple[RecordedCycle, ...]


@dataclass(frozen=True)
class HostPause:
    """A burst whose gaps are for the most part a few long ones.

    Attributes:
        batch: Requests sent together.
        seconds: The long gaps, in their order.
        gaps: Number of gaps of the burst.
        usual: The median gap in seconds.
    """

    batch: int
    seconds: tuple[float, ...]
    gaps: int
    usual: float


@dataclass(frozen=True)
class Recording:
    """A recording that has been checked.

    Attributes:
        description: What it is.
        run: Facts of the run.
        groups: By growing batch.
        baseline: Batch size label -> seconds of a decode step without speculation; empty where none was measured.
        baseline_source: How that was measured.
    """

    description: str
    run: Run
    groups: tuple[Group, ...]
    baseline: Mapping[str, float] = field(default_factory=dict)
    baseline_source: str = ""

    def pauses(self) -> tuple[HostPause, ...]:
        """Return the bursts in which the first rank's host paused: a replay repeats the pause with its burst."""
        found = []
        for group in self.groups:
            gaps = [cycle.gap for cycle in group.cycles if cycle.gap is not None]
            usual = median(gaps) if gaps else 0.0
            long = tuple(gap for gap in gaps if gap > _PAUSE * usual)
            if long and sum(long) > sum(gaps) / 2:
                found.append(HostPause(group.batch, long, len(gaps), usual))
        return tuple(found)

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks that were recorded."""
        return 1 + len(self.groups[0].cycles[0].other_ranks)


# --- reading ---------------------------------------------------------------------------------------------
def shipped(ranks: int) -> Path:
    """Return the recording in the package that is played on so many ranks: of one GPU on one, else of two ranks."""
    return DEFAULT_RECORDING if ranks == 1 else RANKS_RECORDING


def load(path: Path = DEFAULT_RECORDING) -> Recording:
    """Read and check a recording.

    Raises:
        RecordingError: It cannot be read, or is not a recording of this version.
    """
    data = _read_json(path)
    try:
        return parse(data)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from error


def parse(data: Any) -> Recording:
    """Check the content of a recording.

    Raises:
        RecordingError: It is not a recording of this version; the message names the place.
    """
    if isinstance(data, list):
        raise RecordingError(
            "this is the raw list of groups that a GPU run writes; convert it first: "
            "python -m eagle_exporter.demo.recording RAW.json.gz OUT.json.gz"
        )
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordingError(f'not a recording: "format": "{FORMAT}" expected')
    if data.get("version") != VERSION:
        raise RecordingError(f"version {data.get('version')!r} of the format; this reads version {VERSION}")
    description = data.get("description")
    if not isinstance(description, str):
        raise RecordingError('"description": a text expected')
    run = _parse_run(data.get("run"))
    entries = data.get("groups")
    if not isinstance(entries, list) or not entries:
        raise RecordingError('"groups": a list with at least one group expected')
    groups = [_parse_group(entry, f"group {number}", run) for number, entry in enumerate(entries)]
    batches = [group.batch for group in groups]
    if len(set(batches)) != len(batches):
        raise RecordingError(f"two groups have the same batch: {batches}")
    ranks = {group.batch: 1 + len(group.cycles[0].other_ranks) for group in groups}
    if len(set(ranks.values())) != 1:
        raise RecordingError(f"the groups hold different numbers of ranks, by batch: {ranks}")
    baseline, source = _parse_baseline(data.get("baseline"))
    return Recording(description, run, tuple(sorted(groups, key=lambda group: group.batch)), baseline, source)


def _parse_baseline(data: Any) -> tuple[dict[str, float], str]:
    if data is None:
        return {}, ""
    if not isinstance(data, dict) or not isinstance(data.get("decode_seconds"), dict):
        raise RecordingError('"baseline": an object with decode_seconds expected')
    source = data.get("source")
    if not isinstance(source, str) or not source:
        raise RecordingError('"baseline": it does not say how it was measured (source)')
    for size, seconds in data["decode_seconds"].items():
        if size not in catalogue.BATCH_SIZES:
            raise RecordingError(f'"baseline": {size!r} is none of {", ".join(catalogue.BATCH_SIZES)}')
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise RecordingError(f'"baseline": {seconds!r} is no positive number of seconds')
    return {size: float(seconds) for size, seconds in data["decode_seconds"].items()}, source


def _read_json(path: Path) -> Any:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return json.loads(content)
    except OSError as error:  # a broken gzip stream is one too
        raise RecordingError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError) as error:
        raise RecordingError(f"{path}: not a (gzipped) JSON file: {error}") from error


def _parse_run(data: Any) -> Run:
    if not isinstance(data, dict):
        raise RecordingError('"run": an object expected')
    values: dict[str, Any] = {}
    for fact in fields(Run):
        if fact.name not in data:
            continue
        value = data[fact.name]
        number = fact.type in ("int", "int | None")
        if number and not (_is_count(value) or (value is None and fact.type == "int | None")):
            raise RecordingError(f'"run": {fact.name} is {value!r}; a whole number expected')
        if not number and not isinstance(value, str):
            raise RecordingError(f'"run": {fact.name} is {value!r}; a text expected')
        values[fact.name] = value
    try:
        run = Run(**values)
    except TypeError as error:
        missing = [name for name in Run.__annotations__ if name not in values and not hasattr(Run, name)]
        raise RecordingError(f'"run": {", ".join(missing)} missing') from error
    if run.num_steps < 1 or run.topk < 1 or run.num_draft_tokens < 2:
        raise RecordingError('"run": num_steps and topk from 1, num_draft_tokens from 2')
    return run


def _parse_group(entry: Any, where: str, run: Run) -> Group:
    if not isinstance(entry, dict) or not isinstance(entry.get("columns"), dict):
        raise RecordingError(f'{where}: an object with "batch" and "columns" expected')
    batch, columns = entry.get("batch"), entry["columns"]
    if not isinstance(batch, int) or not _is_count(batch) or batch < 1:
        raise RecordingError(f"{where}: batch is {batch!r}; a number from 1 expected")
    where = f"{where} (batch {batch})"
    rows = _column(columns, "rows", where, None, _is_count)
    if not rows:
        raise RecordingError(f"{where}: no cycle")

    def column(name: str, check: Callable[[Any], bool]) -> list[Any]:
        return _column(columns, name, where, len(rows), check)

    accepted = column("accepted", _list_of(_is_count))
    context = column("context", _list_of(_is_count))
    wasted = column("wasted", _is_count)
    first = _parse_times(columns, where, len(rows), run)
    tables = entry.get("other_ranks", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RecordingError(f'{where}: "other_ranks": a list of objects expected')
    others = [
        _parse_times(table, f"{where}: rank {number}", len(rows), run) for number, table in enumerate(tables, start=1)
    ]
    cycles = []
    for i in range(len(rows)):
        place = f"{where}: cycle {i}"
        live = len(accepted[i])
        if live == 0:
            raise RecordingError(f"{place}: no live row")
        if live + wasted[i] != rows[i]:
            raise RecordingError(f"{place}: {live} live and {wasted[i]} wasted rows, but {rows[i]} rows")
        if len(context[i]) != live:
            raise RecordingError(f"{place}: {live} accept lengths, but {len(context[i])} context lengths")
        if max(accepted[i]) > run.num_steps:
            raise RecordingError(f"{place}: {max(accepted[i])} tokens accepted of {run.num_steps} steps")
        cycles.append(
            RecordedCycle(
                **{time.name: getattr(first[i], time.name) for time in fields(RankTimes)},
                rows=rows[i],
                accepted=tuple(accepted[i]),
                context=tuple(context[i]),
                wasted=wasted[i],
                other_ranks=tuple(times[i] for times in others),
            )
        )
    return Group(batch, tuple(cycles))


def _parse_times(columns: Mapping[str, Any], where: str, length: int, run: Run) -> list[RankTimes]:
    """Return what one rank measured in each of `length` cycles."""

    def column(name: str, check: Callable[[Any], bool]) -> list[Any]:
        return _column(columns, name, where, length, check)

    def by_phase(name: str) -> list[tuple[float, ...]]:
        table = columns.get(name)
        if not isinstance(table, dict):
            raise RecordingError(f"{where}: column {name}: an object with one column per phase expected")
        parts = [_column(table, phase, where, length, _is_time, f"{name}.{phase}") for phase in catalogue.PHASES]
        return [_seconds(values) for values in zip(*parts, strict=True)]

    host_bound = column("host_bound", lambda value: value is None or isinstance(value, bool))
    gap = column("gap", lambda value: value is None or _is_time(value))
    steps = column("steps", _list_of(_is_time))
    parts = column("parts", lambda value: value is None or (_list_of(_is_time)(value) and len(value) == _PARTS))
    phases, host = by_phase("phases"), by_phase("host")
    for i in range(length):
        place = f"{where}: cycle {i}"
        if len(steps[i]) not in (0, run.num_steps - 1):
            raise RecordingError(f"{place}: {len(steps[i])} draft forwards, {run.num_steps - 1} expected")
        if sum(phases[i]) <= 0.0:
            raise RecordingError(f"{place}: it took no time")
    return [
        RankTimes(
            host_bound=host_bound[i],
            phases=phases[i],
            host=host[i],
            gap=None if gap[i] is None else gap[i] * _NANOSECOND,
            steps=_seconds(steps[i]),
            parts=None if parts[i] is None else _seconds(parts[i]),
        )
        for i in range(length)
    ]


def _column(
    table: Mapping[str, Any],
    name: str,
    where: str,
    length: int | None,
    check: Callable[[Any], bool],
    shown: str | None = None,
) -> list[Any]:
    values = table.get(name)
    shown = shown or name
    if not isinstance(values, list):
        raise RecordingError(f"{where}: column {shown} is missing")
    if length is not None and len(values) != length:
        raise RecordingError(f"{where}: column {shown} has {len(values)} entries for {length} cycles")
    for i, value in enumerate(values):
        if not check(value):
            raise RecordingError(f"{where}: column {shown}, cycle {i}: {value!r} is not allowed")
    return values


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_time(value: Any) -> bool:
    return _is_count(value) and value < _LONGEST_NANOSECONDS


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _seconds(nanoseconds: Sequence[int]) -> tuple[float, ...]:
    return tuple(value * _NANOSECOND for value in nanoseconds)


# --- converting ------------------------------------------------------------------------------------------
def convert(raw: Any, *, description: str | None = None, **facts: Any) -> dict[str, Any]:
    """Return the content of a recording from the list of groups that a GPU run writes.

    Args:
        raw: ``[{"batch": n, "cycles": [{rows, num_steps, num_draft_tokens, accepted, context, wasted, host_bound,
            cycle, phases, host, gap, steps, parts}, ...]}, ...]``, times in seconds. Where several ranks were recorded,
            a group's ``other_ranks`` is a list with such a list of cycles for each further rank.
        description: What it is; None for a sentence that says how many GPUs were recorded.
        facts: Facts of the run (`Run`); ``num_steps`` and ``num_draft_tokens`` come from the cycles.

    Raises:
        RecordingError: The list is not of this shape, or its phases do not add up to the cycle.
    """
    if not isinstance(raw, list) or not raw:
        raise RecordingError("a list of groups expected")
    settings: set[tuple[int, int]] = set()
    groups = []
    for number, group in enumerate(raw):
        try:
            cycles = group["cycles"]
            settings |= {(cycle["num_steps"], cycle["num_draft_tokens"]) for cycle in cycles}
            for i, cycle in enumerate(cycles):
                _check_closure(cycle, f"group {number}: cycle {i}")
            columns = {
                **{name: [cycle[name] for cycle in cycles] for name in ("rows", "accepted", "context", "wasted")},
                **_time_columns(cycles),
            }
            groups.append({"batch": group["batch"], "columns": columns})
            others = group.get("other_ranks", [])
            for rank, theirs in enumerate(others, start=1):
                _check_same_cycles(cycles, theirs, f"group {number}: rank {rank}")
            if others:
                groups[-1]["other_ranks"] = [_time_columns(theirs) for theirs in others]
        except (KeyError, TypeError, IndexError) as error:
            raise RecordingError(f"group {number}: not as a GPU run writes it: {error!r}") from error
    if len(settings) != 1:
        raise RecordingError(f"one num_steps and num_draft_tokens expected in all cycles, not {settings}")
    num_steps, num_draft_tokens = settings.pop()
    run = Run(num_steps=num_steps, num_draft_tokens=num_draft_tokens, **facts)
    if description is None:
        ranks = 1 + len(groups[0].get("other_ranks", ()))
        where = "one GPU" if ranks == 1 else f"{ranks} GPUs with tensor parallelism, the times of each"
        description = _DESCRIPTION.format(where=where)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "description": description,
        "run": asdict(run),
        "groups": groups,
    }
    parse(data)
    return data


def _check_closure(cycle: Mapping[str, Any], place: str) -> None:
    if abs(sum(cycle["phases"]) - cycle["cycle"]) > _CLOSURE_SECONDS:
        raise RecordingError(f"{place}: phases sum to {sum(cycle['phases'])!r} s, the cycle is {cycle['cycle']!r}")


def _check_same_cycles(cycles: Sequence[Any], theirs: Sequence[Any], where: str) -> None:
    """Ranks of a group run the same cycles, and only then can they be put side by side."""
    if len(theirs) != len(cycles):
        raise RecordingError(f"{where}: {len(theirs)} cycles, {len(cycles)} of the first rank")
    for i, (mine, other) in enumerate(zip(cycles, theirs, strict=True)):
        _check_closure(other, f"{where}: cycle {i}")
        if other["rows"] != mine["rows"] or list(other["accepted"]) != list(mine["accepted"]):
            raise RecordingError(f"{where}: cycle {i} is not that of the first rank")


def _time_columns(cycles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def by_phase(name: str) -> dict[str, list[int]]:
        return {phase: [_nanoseconds(cycle[name][i]) for cycle in cycles] for i, phase in enumerate(catalogue.PHASES)}

    return {
        "host_bound": [cycle["host_bound"] for cycle in cycles],
        "gap": [None if cycle["gap"] is None else _nanoseconds(cycle["gap"]) for cycle in cycles],
        "steps": [[_nanoseconds(step) for step in cycle["steps"] or ()] for cycle in cycles],
        "parts": [
            None if cycle["parts"] is None else [_nanoseconds(part) for part in cycle["parts"]] for cycle in cycles
        ],
        "phases": by_phase("phases"),
        "host": by_phase("host"),
    }


def _nanoseconds(seconds: float) -> int:
    # CUDA's resolution can put a boundary a fraction of a microsecond before the one it follows.
    if not math.isfinite(seconds) or seconds < -_CLOSURE_SECONDS:
        raise RecordingError(f"{seconds!r} is no duration")
    return max(0, round(seconds / _NANOSECOND))


def save(data: Mapping[str, Any], path: Path) -> None:
    """Write the content of a recording, the same bytes for the same content; gzipped when `path` ends in ``.gz``."""
    content = json.dumps(data, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, 9, mtime=0)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert the raw list of groups; returns the exit code: 0, or 1 when it cannot be converted."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle_exporter.demo.recording",
        description="Convert the cycles that a GPU run recorded into a recording for demo --replay.",
    )
    parser.add_argument("raw", type=Path, help="what the GPU run wrote (JSON, also gzipped)")
    parser.add_argument("out", type=Path, help="the recording to write (gzipped if it ends in .gz)")
    parser.add_argument("--gpu", default="NVIDIA H200", help="default: %(default)s")
    parser.add_argument("--sglang", default="0.5.16", help="its version (default: %(default)s)")
    parser.add_argument("--torch", default="2.11.0+cu130", help="its version (default: %(default)s)")
    parser.add_argument("--model", default="llama-3-8b-shape", help="default: %(default)s")
    parser.add_argument("--topk", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--attention-backend", default="TritonAttnBackend", help="default: %(default)s")
    parser.add_argument("--kv-pool-tokens", type=int, default=120000, help="default: %(default)s")
    parser.add_argument("--description", help="what it is (default: a sentence with the number of GPUs)")
    args = parser.parse_args(arguments)
    facts = {name: value for name, value in vars(args).items() if name not in ("raw", "out")}
    try:
        save(convert(_read_json(args.raw), **facts), args.out)
    except (RecordingError, OSError) as error:
        print(f"recording: {error}", file=sys.stderr)
        return 1
    recording = load(args.out)
    cycles = sum(len(group.cycles) for group in recording.groups)
    batches = ", ".join(str(group.batch) for group in recording.groups)
    size = f"{args.out.stat().st_size / 1000:.0f} kB"
    print(f"{args.out}: {cycles} cycles at batch {batches}, of {recording.ranks} rank(s), {size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
