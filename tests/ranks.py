"""Rank files for tests, written by a process of their own.

A rank is alive while its writer holds a POSIX record lock, and a process never sees its own locks; so a test
that wants a rank that is alive needs another process. Run as a program, this is that process: it serves
commands on its standard input, one JSON object a line, and answers each with one line.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_exporter import catalogue
from eagle_exporter.registry import layout as fmt
from eagle_exporter.registry.layout import Layout, RankPlan
from eagle_exporter.registry.writer import RankWriter, server_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

INFOS: dict[str, list[tuple[str, ...]]] = {
    "eagle_spec_config_info": [
        (
            *("1a2b3c4d", "EAGLE3", "v2", "3", "1", "4", "false", "flashinfer", "flashinfer", "true", "true"),
            *("8", "1", "1", "1", "1", "draft", "0.5.20", "2.9.1"),
        )
    ],
    "eagle_nccl_config_info": [("2.27.5", "LL", "Ring", "SYS", "", "", "", "", "", "")],
    "eagle_allreduce_config_info": [("true", "false", "false", "false", "false")],
    "eagle_gpu_info": [("0", "GPU-0", "00000000:01:00.0", "NVIDIA H200")],
    "eagle_timing_info": [("cuda_event", "graph_events", "auto")],
}
PHASE_SECONDS = {
    "draft_steps": 0.00087,
    "target_verify": 0.0287,
    "draft_extend": 0.00029,
    "verify_overhead": 0.00031,
    "kv_cache": 0.00005,
    "other": 0.00002,
}
"""One cycle of the background story, its remainder spread over the phases it had not measured."""


def make_plan(
    server: str = "node-a:30000",
    tp_rank: int = 0,
    *,
    recording: bool = True,
    histograms: bool | None = None,
    tiers: tuple[int, ...] = (0, 3),
    hooks_down: tuple[str, ...] = (),
    clock: str = "cuda_event",
) -> RankPlan:
    """Return the plan of a rank with every hook attached but `hooks_down`."""
    labels = dict(zip(catalogue.COMMON_LABELS, (server, "kimi-k2.5", "unified", str(tp_rank), "0", ""), strict=True))
    return RankPlan(
        labels=labels,
        recording=recording,
        histograms=recording if histograms is None else histograms,
        num_steps_tiers=tiers,
        hooks={hook: hook not in hooks_down for hook in catalogue.HOOKS},
        clock=clock,
        infos=INFOS,
        baseline_batch_sizes=("1",),
    )


class Rank:
    """A writer in this process."""

    def __init__(self, root: Path, plan: RankPlan) -> None:
        """Create the file of the rank under `root`."""
        # As in SGLang's processes: the group that may read, when it is another user who reads.
        group = os.environ.get("EAGLE_EXPORTER_GROUP")
        directory = server_directory(root, plan.labels["server"], group=group)
        self.plan = plan
        self.layout = Layout(plan)
        name = fmt.file_name(int(plan.labels["tp_rank"]), int(plan.labels["pp_rank"]), None)
        problems = {hook: f"no function of {hook}" for hook, up in plan.hooks.items() if not up}
        self.writer = RankWriter(directory / name, self.layout, group=group, hooks=problems)
        now = time.time()
        self.set("eagle_rank_start_timestamp_seconds", now)
        self.set("eagle_running_requests", 0)
        self.set("eagle_spec_num_steps", plan.max_num_steps)
        self.set("eagle_spec_num_draft_tokens", plan.max_num_steps + 1)
        self.set("eagle_kv_pool_tokens", 1_000_000)
        self.set("eagle_draft_memory_bytes", 5.2e9)
        self.set("eagle_baseline_decode_seconds", 0.0111, "1")
        for hook in catalogue.HOOKS:
            self.set("eagle_hook_up", float(plan.hooks[hook]), hook)
        for state in catalogue.TIMING_STATES:
            self.set("eagle_timing_enabled", float(state == "on"), state)
        self.writer.commit()

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a series where this rank has it."""
        slot = self.layout.slot(name, *labels)
        if slot is not None:
            self.writer.values[slot] = value

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a series where this rank has it."""
        slot = self.layout.slot(name, *labels)
        if slot is not None:
            value = self.writer.values[slot]
            self.writer.values[slot] = amount if math.isnan(value) else value + amount

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Observe into a histogram where this rank has it."""
        slot = self.layout.slot(name, *labels)
        family = next((family for family in self.layout.families if family.metric.name == name), None)
        if slot is not None and family is not None:
            self.writer.observe(slot, family.bounds, value)

    def cycles(
        self,
        count: int = 1,
        *,
        batch_size: int = 1,
        num_steps: int | None = None,
        accepted: int = 1,
        gap: float = 0.0004,
        phases: Mapping[str, float] = PHASE_SECONDS,
        commit: bool = True,
    ) -> None:
        """Record `count` equal cycles in which every request accepts `accepted` tokens."""
        steps = self.plan.max_num_steps if num_steps is None else num_steps
        size, tier = catalogue.batch_size_label(batch_size), str(steps)
        drafts = count * batch_size if steps else 0
        self.add("eagle_cycles_total", count)
        self.add("eagle_batch_cycles_total", count, size, tier)
        self.add("eagle_batch_timed_cycles_total", count, size, tier)
        self.add("eagle_batch_gap_seconds_total", count * gap, size, tier)
        for phase, seconds in phases.items():
            self.add("eagle_batch_phase_seconds_total", count * seconds, size, tier, phase)
            self.add("eagle_phase_host_seconds_total", count * seconds * 0.1, phase)
        self.add("eagle_batch_drafts_total", drafts, size, tier)
        self.add("eagle_batch_accepted_tokens_total", drafts * accepted, size, tier)
        self.add("eagle_batch_context_tokens_total", drafts * 1500, size, tier)
        self.add("eagle_drafts_total", drafts)
        self.add("eagle_draft_tokens_total", drafts * steps)
        self.add("eagle_accepted_tokens_total", drafts * accepted)
        self.add("eagle_verified_tokens_total", drafts * (accepted + 1))
        self.add("eagle_output_tokens_total", drafts * (accepted + 1))
        self.add("eagle_context_drafts_total", drafts, "1k-2k")
        self.add("eagle_context_accepted_tokens_total", drafts * accepted, "1k-2k")
        for position in range(steps):
            self.add("eagle_offered_tokens_per_pos_total", drafts, str(position))
            self.add("eagle_accepted_tokens_per_pos_total", drafts * (position < accepted), str(position))
        for _ in range(count if steps else 0):
            self.observe("eagle_cycle_duration_seconds", sum(phases.values()))
            self.observe("eagle_cycle_gap_seconds", gap)
            for phase, seconds in phases.items():
                self.observe("eagle_phase_duration_seconds", seconds, phase)
            for _ in range(batch_size):
                self.observe("eagle_accept_length_tokens", accepted + 1)
        self.set("eagle_last_cycle_timestamp_seconds", time.time())
        self.set("eagle_running_requests", batch_size)
        if commit:
            self.writer.commit()


class RankProcess:
    """Ranks that are alive: a child process holds their files. Use it as a context manager."""

    def __init__(self, root: Path, *plans: Mapping[str, Any]) -> None:
        """Start the child.

        Args:
            root: The registry root.
            plans: Keyword arguments of `make_plan`, one mapping per rank; one default rank when none is
                given.
        """
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root), json.dumps(plans or [{}])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        self._answer()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def cycles(self, count: int = 1, *, rank: int | None = None, **arguments: Any) -> None:
        """Call `Rank.cycles` on one rank (its index), or on all, and wait until it is done."""
        self._command({"do": "cycles", "rank": rank, "count": count, **arguments})

    def set(self, name: str, value: float, *labels: str, rank: int | None = None) -> None:
        """Call `Rank.set` and commit."""
        self._command({"do": "set", "rank": rank, "name": name, "value": value, "labels": labels})

    def stop_timing(self, state: str) -> None:
        """Show on all ranks what hooks show that stopped measuring, whether they could be attached or not."""
        self.set("eagle_timing_enabled", 0, "on")
        self.set("eagle_timing_enabled", 1, state)
        for hook in catalogue.HOOKS:
            self.set("eagle_hook_up", 0, hook)

    def run(self, *, per_second: float = 30.0, **arguments: Any) -> None:
        """Let the child write cycles on all ranks by itself until it is killed or told something else."""
        self._command({"do": "run", "rank": None, "per_second": per_second, **arguments})

    def kill(self) -> None:
        """End the child with SIGKILL, as the out-of-memory killer would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the child; its files stay."""
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if answer != "done":
            raise RuntimeError(f"the writing process answered {answer!r}")


def write_ended(root: Path, *plans: Mapping[str, Any], cycles: int = 10) -> None:
    """Leave files behind whose writer has ended."""
    with RankProcess(root, *plans) as process:
        if cycles:
            process.cycles(cycles)


def _serve(root: Path, plans: list[dict[str, Any]]) -> None:
    ranks = []
    for plan in plans:
        arguments: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in plan.items()
        }
        ranks.append(Rank(root, make_plan(**arguments)))
    print("done", flush=True)
    interval: float | None = None
    repeated: dict[str, Any] = {}
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], interval)
        if not ready:
            for rank in ranks:
                rank.cycles(1, **repeated)
            continue
        line = sys.stdin.readline()
        if not line:
            return
        command = json.loads(line)
        do, index = command.pop("do"), command.pop("rank")
        chosen = ranks if index is None else [ranks[index]]
        interval = None
        if do == "run":
            interval = 1 / command.pop("per_second")
            repeated = command
        for rank in chosen:
            if do == "cycles":
                rank.cycles(**command)
            elif do == "set":
                rank.set(command["name"], command["value"], *command["labels"])
                rank.writer.commit()
        print("done", flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), json.loads(sys.argv[2]))
