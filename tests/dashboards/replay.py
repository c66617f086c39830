"""Recorded GPU cycles, written into registry files by the real recorder, in a process of its own.

Run as a program it serves commands on standard input, one JSON object a line (``start``, ``cycles``, ...).
The recording is ``data/cycles.json``; another one of the same shape can take its place.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from eagle_exporter import catalogue
from eagle_exporter.registry.layout import Layout, RankPlan, file_name
from eagle_exporter.registry.writer import RankWriter, clear_stale_files, server_directory
from eagle_exporter.timing.cycle import Acceptance, CycleRecord, PhaseTimes
from eagle_exporter.timing.recorder import RankRecorder

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

RECORDING = Path(__file__).parent / "data" / "cycles.json"
VERIFY = catalogue.PHASES.index("target_verify")
DRAFT = catalogue.PHASES.index("draft_steps")


KERNELS: dict[str, dict[str, float]] = {
    "target_verify": {"gemm": 3.759, "attention": 0.781, "norm": 0.162, "kv": 0.106, "other": 0.178, "memcpy": 0.002},
    "draft_steps": {"gemm": 0.24, "attention": 0.05, "sampling": 0.04, "norm": 0.02, "other": 0.019},
    "draft_extend": {"gemm": 0.21, "attention": 0.03, "norm": 0.012, "other": 0.012},
    "verify_overhead": {"sampling": 0.008, "memcpy": 0.006, "other": 0.004},
}
"""Milliseconds per cycle at batch size 1 on an H200; of the small phases the sums were recorded, their classes not."""


class Recording:
    """The cycles of a recording by the number of requests in them."""

    def __init__(self, path: Path = RECORDING) -> None:
        """Read `path`."""
        data = json.loads(path.read_text())
        columns = data["columns"]
        self.num_steps: int = data["num_steps"]
        phases = [columns.index(phase) for phase in catalogue.PHASES]
        hosts = [columns.index(f"host_{phase}") if f"host_{phase}" in columns else None for phase in catalogue.PHASES]
        gap = columns.index("gap")
        self.cycles: dict[int, list[tuple[list[float], list[float], float, list[int]]]] = {
            int(rows): [
                (
                    [line[i] / 1e6 for i in phases],
                    [0.0 if i is None else line[i] / 1e6 for i in hosts],
                    line[gap] / 1e6,
                    line[-1],
                )
                for line in lines
            ]
            for rows, lines in data["batches"].items()
        }

    def of(self, rows: int) -> list[tuple[list[float], list[float], float, list[int]]]:
        """Return the cycles of the largest recorded batch that is not larger than `rows`."""
        return self.cycles[max(size for size in self.cycles if size <= rows)]


class Server:
    """The ranks of one server in this process."""

    def __init__(
        self,
        root: Path,
        name: str,
        recording: Recording,
        *,
        tp: int = 1,
        dp: int | None = None,
        tiers: tuple[int, ...] = (3,),
        adaptive: bool = False,
        baseline: dict[str, float] | None = None,
        config_id: str = "1a2b3c4d",
        overlap: bool = True,
        hooks_down: tuple[str, ...] = (),
        engine_type: str = "unified",
        nccl: tuple[str, ...] = ("2.27.5", "LL", "Ring", "SYS", "", "", "", "", "", ""),
    ) -> None:
        """Create the files of all ranks.

        Args:
            root: The registry root.
            name: Name of the server.
            recording: Where cycles come from.
            tp: Tensor-parallel ranks.
            dp: Replicas of one rank each (with data parallelism), None without.
            tiers: Step counts.
            adaptive: The step count changes by itself.
            baseline: Configured decode step without speculation, by batch size.
            config_id: Shown as it is.
            overlap: The overlap scheduler runs.
            hooks_down: Hooks that did not attach.
            engine_type: Label value.
            nccl: Label values of the NCCL info.
        """
        self.recording = recording
        self.recorders: list[RankRecorder] = []
        self._position: dict[int, int] = {}
        directory = server_directory(root, name)
        clear_stale_files(directory)
        steps = self._steps = max(tiers)
        for rank in range(dp or tp):
            dp_rank = rank if dp else None
            infos: dict[str, list[tuple[str, ...]]] = {
                "eagle_spec_config_info": [
                    (
                        *(config_id, "EAGLE3", "v2", str(steps), "1", str(steps + 1), str(adaptive).lower()),
                        *(
                            "flashinfer",
                            "flashinfer",
                            str(overlap).lower(),
                            "true",
                            str(tp),
                            "1",
                            str(dp or 1),
                            "1",
                            "1",
                        ),
                        *("draft-2.6b", "0.5.20", "2.9.1"),
                    )
                ],
                "eagle_nccl_config_info": [nccl],
                "eagle_allreduce_config_info": [("true", "false", "false", "false", "false")],
                "eagle_gpu_info": [(str(rank), f"GPU-{name}-{rank}", f"00000000:{rank:02X}:00.0", "NVIDIA H200")],
                "eagle_timing_info": [("cuda_event", "graph_mean", "auto")],
            }
            labels = (name, "kimi-k2.5", engine_type, str(rank), "0", "" if dp_rank is None else str(dp_rank))
            plan = RankPlan(
                labels=dict(zip(catalogue.COMMON_LABELS, labels, strict=True)),
                recording=rank == 0 or dp is not None,
                histograms=rank == 0 or dp is not None,
                num_steps_tiers=tiers,
                hooks={hook: hook not in hooks_down for hook in catalogue.HOOKS},
                clock="cuda_event",
                infos=infos,
                baseline_batch_sizes=tuple(baseline or ()),
            )
            recorder = RankRecorder(RankWriter(directory / file_name(rank, 0, dp_rank), Layout(plan)))
            for size, seconds in (baseline or {}).items():
                recorder.set_gauge("eagle_baseline_decode_seconds", seconds, size)
            recorder.set_gauge("eagle_kv_pool_tokens", 1_000_000)
            recorder.set_gauge("eagle_draft_memory_bytes", 5.2e9)
            recorder.set_gauge("eagle_running_requests", 0)
            recorder.set_gauge("eagle_spec_num_steps", steps)
            recorder.set_gauge("eagle_spec_num_draft_tokens", steps + 1)
            recorder.start(dict(plan.hooks), "on")
            self.recorders.append(recorder)

    def cycles(
        self,
        count: int,
        *,
        rows: int = 1,
        num_steps: int | None = None,
        context: int = 1500,
        verify_factor: float = 1.0,
        accept: float = 1.0,
        longer: bool = False,
        slow_rank: int | None = None,
        host_bound_every: int = 0,
        wasted_every: int = 7,
        only_rank: int | None = None,
        commit: bool = True,
    ) -> None:
        """Replay `count` cycles on every rank.

        Args:
            count: Cycles.
            rows: Requests in the batch; those of the recording are repeated or cut to this number.
            num_steps: Draft steps; less than recorded means less draft time and fewer accepted tokens, 0
                decoding without speculation.
            context: Context tokens of each request.
            verify_factor: Verify is this much slower than recorded.
            accept: Share of the recorded accepted tokens that is kept, rounded down.
            longer: Two recorded drafts make one of up to six accepted tokens.
            slow_rank: A rank whose host needs twice as long.
            host_bound_every: Every n-th cycle the GPU waited for the host.
            wasted_every: In every n-th cycle one more row belongs to a finished request.
            only_rank: Only this rank.
            commit: Publish at the end.
        """
        cycles = self.recording.of(rows)
        steps = self._steps if num_steps is None else num_steps
        start = self._position.get(rows, 0)
        self._position[rows] = start + count
        for index in range(start, start + count):
            phases, host, gap, recorded = cycles[index % len(cycles)]
            accepted = [int(a * accept) for a in islice(cycle(recorded), rows)]
            if longer:
                following = cycles[(index + 1) % len(cycles)][3]
                accepted = [a + b for a, b in zip(accepted, islice(cycle(following), rows), strict=False)]
            accepted = [min(a, steps) for a in accepted]
            times = _scaled(phases, steps, self.recording.num_steps, verify_factor)
            for number, recorder in enumerate(self.recorders):
                if only_rank is not None and number != only_rank:
                    continue
                own = [seconds * (2.0 if number == slow_rank else 1.0) for seconds in host]
                draft = times[DRAFT]
                record = CycleRecord(rows, steps, steps + 1)
                record.host_bound = bool(host_bound_every) and index % host_bound_every == 0
                parts = [times[3] * 0.1, times[3] * 0.6, times[3] * 0.2] if index % 16 == 0 else None
                forwards = [draft / (steps - 1)] * (steps - 1) if steps > 1 else []
                recorder.add_cycle(
                    record,
                    Acceptance(accepted, [context] * rows, wasted_rows=1 if index % wasted_every == 0 else 0),
                    PhaseTimes(sum(times), times, own, parts, forwards, gap),
                )
                recorder.add_output_tokens(sum(accepted) + rows)
                recorder.add_host_cost(12e-6)
                recorder.add_kv_allocation(20e-6)
                recorder.set_running_requests(rows)
        if commit:
            self.commit()

    def capture(
        self,
        cycles: int = 10,
        *,
        ranks: tuple[int, ...] | None = None,
        scale: float = 1.0,
        nccl: float = 0.3,
        slow_rank: int | None = None,
        outcome: str = "completed",
    ) -> None:
        """Add a capture of kernels to the counters, as it is when it has ended.

        The kernels are `KERNELS`, and the part `nccl` of verify is all-reduce, in which the other ranks wait for the
        slow one.

        Args:
            cycles: Captured cycles.
            ranks: Of these ranks; of all when None.
            scale: All times are multiplied by it.
            nccl: Part of verify's kernel time.
            slow_rank: A rank whose other kernels take half longer.
            outcome: Value of the label; only a completed capture has kernels.
        """
        for number, recorder in enumerate(self.recorders):
            if ranks is not None and number not in ranks:
                continue

            def add(name: str, amount: float, *labels: str, recorder: RankRecorder = recorder) -> None:
                slot = recorder.layout.slot(name, *labels)
                if slot is not None:
                    value = recorder.writer.values[slot]
                    recorder.writer.values[slot] = amount if math.isnan(value) else value + amount

            add("eagle_kernel_captures_total", 1, outcome)
            if outcome != "completed":
                continue
            add("eagle_kernel_profiled_cycles_total", cycles)
            recorder.set_gauge("eagle_kernel_last_capture_timestamp_seconds", time.time())
            for phase, classes in KERNELS.items():
                seconds = {name: cycles * scale * milliseconds / 1e3 for name, milliseconds in classes.items()}
                if phase == "target_verify" and nccl:
                    slower = {name: value * 1.5 for name, value in seconds.items()}
                    whole = sum(slower.values() if slow_rank is not None else seconds.values()) / (1 - nccl)
                    seconds = slower if number == slow_rank else seconds
                    seconds["allreduce_nccl"] = whole - sum(seconds.values())
                for name, value in seconds.items():
                    add("eagle_kernel_seconds_total", value, phase, name)
                busy = sum(seconds.values())
                add("eagle_kernel_busy_seconds_total", busy, phase)
                add("eagle_kernel_phase_seconds_total", busy * 1.04, phase)
        self.commit()

    def prefill(self, count: int = 1) -> None:
        """Replay prefill batches."""
        for recorder in self.recorders:
            for _ in range(count):
                recorder.add_prefill(PhaseTimes(0.042, [0.0, 0.04, 0.002, 0.0, 0.0, 0.0], [0.0] * 6))
        self.commit()

    def idle(self) -> None:
        """Show that no request runs: the overlap loop ends with a cycle without a live row."""
        for recorder in self.recorders:
            recorder.set_running_requests(0)
            recorder.add_cycle(CycleRecord(1, self._steps, self._steps + 1), Acceptance(excluded="no_live_row"), None)
            recorder.drop("not_complete")
        self.commit()

    def commit(self) -> None:
        """Publish the values of all ranks."""
        for recorder in self.recorders:
            recorder.commit()

    def stop(self, rank: int | None = None) -> None:
        """Give up the files of one rank, or of all."""
        for number, recorder in enumerate(self.recorders):
            if rank is None or number == rank:
                recorder.writer.close()
        self.recorders = [] if rank is None else [r for n, r in enumerate(self.recorders) if n != rank]


def _scaled(phases: list[float], steps: int, recorded_steps: int, verify_factor: float) -> list[float]:
    """Return the phases of a cycle with another step count: a synthesis, the recording has one only."""
    times = list(phases)
    times[VERIFY] *= verify_factor * (1 - 0.03 * (recorded_steps - steps))
    times[DRAFT] *= max(0, steps - 1) / (recorded_steps - 1)
    if steps == 0:
        times = [times[VERIFY] if i == VERIFY else 0.0 for i in range(len(times))]
    return times


class ReplayProcess:
    """A process that holds the files: a process never sees its own locks. Use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent)},
        )

    def start(self, root: Path, server: str, **arguments: Any) -> None:
        """Start a server (see `Server`)."""
        self._command("start", root=str(root), server=server, **arguments)

    def cycles(self, server: str, count: int, **arguments: Any) -> None:
        """Replay cycles (see `Server.cycles`)."""
        self._command("cycles", server=server, count=count, **arguments)

    def capture(self, server: str, cycles: int = 10, **arguments: Any) -> None:
        """Add a capture of kernels (see `Server.capture`)."""
        self._command("capture", server=server, cycles=cycles, **arguments)

    def prefill(self, server: str) -> None:
        """Replay one prefill batch."""
        self._command("prefill", server=server)

    def idle(self, server: str) -> None:
        """Show that no request runs."""
        self._command("idle", server=server)

    def stop(self, server: str, rank: int | None = None) -> None:
        """End one rank or a whole server, as far as anybody can see."""
        self._command("stop", server=server, rank=rank)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _command(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "done":
            raise RuntimeError(f"{do} {arguments}: the replaying process answered {answer!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve() -> None:
    recording = Recording()
    servers: dict[str, Server] = {}
    for line in sys.stdin:
        command = json.loads(line)
        do, server = command.pop("do"), command.pop("server")
        if do == "start":
            root = Path(command.pop("root"))
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in command.items()
            }
            if server in servers:
                servers[server].stop()
            servers[server] = Server(root, server, recording, **values)
        else:
            getattr(servers[server], do)(**command)
        print("done", flush=True)


if __name__ == "__main__":
    _serve()
