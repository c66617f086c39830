"""Drives one real SGLang engine with the plugin: requests, commands to all ranks, and what the registry gained.

On a GPU machine the model pair is the synthetic one of `models`. `cpu` is the demo's tiny pair without a GPU, to try
the flow of a part: what it prints is no figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tests.gpu import figures, models

MODELS = Path(os.environ.get("MODELS", "/dev/shm/eagle-models"))
REGISTRY = Path(os.environ.get("EAGLE_GPU_REGISTRY", "/dev/shm/eagle-gpu-registry"))
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""With several ranks NVLink multicast stays off: the all-reduce is NCCL's own, and its protocol and algorithm
matter."""
_COMMAND_SECONDS = 60.0
_SETTLE_SECONDS = 5.0
_START_SECONDS = 280.0
_REQUEST_SECONDS = 120.0
_MODEL_BYTES = {"llama3-8b": 16e9, "small": 2e9}
"""Room that a model pair needs."""
_kept: list[Any] = []
"""What is left of engines that ended on their own: ZeroMQ would wait forever to hand on what they were still sent, were
they collected."""


@dataclass(frozen=True)
class Platform:
    """Where an engine runs, and what it serves.

    Attributes:
        name: ``cuda`` or ``cpu``.
        build: Makes a model pair of a shape and returns its directory.
        arguments: Of ``sglang.Engine``.
        environment: Of the server.
        prompt: Prompt number n.
        expected: The greedy continuation of a prompt.
    """

    name: str
    build: Callable[[str], Path]
    arguments: Mapping[str, Any]
    prompt: Callable[[int], list[int]]
    expected: Callable[[list[int], int], Sequence[int]]
    environment: Mapping[str, str] = field(default_factory=dict)


def _build_for_gpu(shape: str) -> Path:
    directory = MODELS / shape
    MODELS.mkdir(parents=True, exist_ok=True)
    if not directory.exists() and shutil.disk_usage(MODELS).free < _MODEL_BYTES[shape]:
        directory = Path("/tmp/eagle-models") / shape
        print(f"{MODELS} is too small: {directory}", flush=True)
    models.build(directory, shape)
    return directory


CUDA = Platform(
    "cuda",
    _build_for_gpu,
    {
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "mem_fraction_static": 0.5,
        "context_length": 8192,
        "disable_prefill_cuda_graph": True,
        "max_total_tokens": 120000,
        "max_running_requests": 16,
        "cuda_graph_max_bs_decode": 16,
    },
    models.prompt,
    models.expected_tokens,
)


def cpu() -> Platform:
    """Return the platform without a GPU; ``try_on_cpu.sh`` sets the rest of the environment."""
    from eagle_exporter.demo import answers
    from eagle_exporter.demo.models import build_pair
    from eagle_exporter.demo.sglang_server import _cores_per_rank

    def build(shape: str) -> Path:
        del shape
        directory = MODELS / "cpu"
        if not (directory / "draft").exists():
            build_pair(directory)
        return directory

    def prompt(index: int) -> list[int]:
        return [(5 + 3 * index + offset) % answers.VOCABULARY_SIZE for offset in range(8)]

    return Platform(
        "cpu",
        build,
        {
            "device": "cpu",
            "dtype": "float32",
            "disable_cuda_graph": True,
            "attention_backend": "torch_native",
            "prefill_attention_backend": "intel_amx",
            "speculative_draft_attention_backend": "intel_amx",
            "disable_overlap_schedule": True,
            "max_total_tokens": 32768,
            "max_running_requests": 16,
            "mem_fraction_static": 0.05,
            "chunked_prefill_size": 2048,
        },
        prompt,
        lambda tokens, count: list(answers.expected_tokens(tokens, count)),
        {
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": _cores_per_rank(2),
        },
    )


class Engine:
    """One SGLang engine with the plugin, the switch, and the registry files that it writes.

    Attributes:
        name: Name of the server in the registry.
        ranks: Tensor-parallel ranks.
        start_seconds: How long the start took.
        died: Why it serves nothing any more, "" while it does.
    """

    started: ClassVar[list[Engine]] = []
    """Those that are not closed."""
    died = ""
    _processes: Sequence[Any] = ()

    def __init__(
        self,
        name: str,
        shape: str,
        *,
        topk: int = 1,
        steps: int = 3,
        draft_tokens: int = 4,
        ranks: int = 1,
        platform: Platform = CUDA,
        environment: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        """Start it.

        Args:
            name: Name of the server.
            shape: Of the model.
            topk: Width of the draft tree.
            steps: Draft steps.
            draft_tokens: Tokens verified per request and cycle.
            ranks: Tensor-parallel ranks, one GPU each.
            platform: Where it runs.
            environment: Variables of this engine only, for example ``NCCL_PROTO``.
            extra: More arguments of ``sglang.Engine``.
        """
        self.name = name
        self.ranks = ranks
        self.platform = platform
        self.switch = Path(f"/tmp/eagle-switch-{name}")
        self.sequence = 0
        for path in self.switch.parent.glob(f"{self.switch.name}*"):
            path.unlink()  # what an earlier run was told
        values = {
            **({**NO_MULTICAST, "NCCL_DEBUG": "WARN"} if ranks > 1 else {}),
            **platform.environment,
            "EAGLE_GPU_SWITCH": str(self.switch),
            "EAGLE_EXPORTER_ENABLED": "1",
            "EAGLE_EXPORTER_EMBED": "0",
            "EAGLE_EXPORTER_DIR": str(REGISTRY),
            "EAGLE_EXPORTER_SERVER": name,
            "SGLANG_PLUGINS": "eagle_exporter,eagle_gpu_switch",
            **(environment or {}),
        }
        self._before = {variable: os.environ.get(variable) for variable in values}
        os.environ.update(values)
        import sglang

        _survive_a_failed_start()
        pair = platform.build(shape)
        begin = time.time()
        with self._taking_back(), limited(_START_SECONDS, f"the start of engine {name}"):
            self._start(sglang, pair, steps, topk, draft_tokens, extra)
        self.start_seconds = time.time() - begin
        self.started.append(self)
        self._processes = multiprocessing.active_children()
        print(f"[{name}] engine up in {self.start_seconds:.1f} s", flush=True)

    def _start(
        self, sglang: Any, pair: Path, steps: int, topk: int, draft_tokens: int, extra: Mapping[str, Any]
    ) -> None:
        self.engine = sglang.Engine(
            model_path=str(pair / "target"),
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(pair / "draft"),
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=draft_tokens,
            skip_tokenizer_init=True,
            skip_server_warmup=True,
            log_level="info",
            random_seed=1,
            # SGLang's own all-reduce would make every NCCL setting irrelevant.
            disable_custom_all_reduce=True,
            tp_size=self.ranks,
            **({**self.platform.arguments, **extra}),
        )
        # SGLang's own handlers end this process when a rank ends: what is still to be measured would be lost.
        if hasattr(self.engine.tokenizer_manager, "signal_handler_class"):
            self.engine.tokenizer_manager.signal_handler_class = lambda manager: _Handlers(self, manager)

    @contextlib.contextmanager
    def _taking_back(self) -> Iterator[None]:
        """Leave nothing of a start that failed."""
        try:
            yield
        except BaseException as error:
            _kept.append(error)
            _end_children()
            self._restore()
            raise

    def _restore(self) -> None:
        for variable, value in self._before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value

    def _check(self) -> None:
        """Raise when the engine serves nothing any more."""
        codes = {process.name: process.exitcode for process in self._processes if process.exitcode}
        if codes and not self.died:
            self.died = f"processes of the engine ended with {codes}"
        if self.died:
            raise RuntimeError(self.died)

    # --- commands ----------------------------------------------------------------------------------------
    def command(self, **command: Any) -> dict[str, Any]:
        """Let the scheduler of every rank obey a command while it is idle.

        Returns:
            The answer of rank 0, with those of all under ``ranks``. All ranks have obeyed by then, and none has
            served a request meanwhile: the switch is one for the whole group.

        Raises:
            RuntimeError: A rank failed, or the ranks are not in one mode.
            TimeoutError: A rank does not answer.
        """
        self._check()
        self.sequence += 1
        temporary = self.switch.with_suffix(".tmp")
        temporary.write_text(json.dumps({"sequence": self.sequence, **command}))
        temporary.rename(self.switch)
        deadline = time.time() + _COMMAND_SECONDS
        check = time.time() + 1.0
        while True:
            answers = [self._answer(rank) for rank in range(self.ranks)]
            missing = [rank for rank, answer in enumerate(answers) if answer is None]
            if not missing:
                return joined([answer for answer in answers if answer is not None])
            if time.time() > deadline:
                raise TimeoutError(f"no answer of rank(s) {missing} to {command}")
            if time.time() > check:
                check = time.time() + 1.0
                self._check()
            time.sleep(0.002)

    def _answer(self, rank: int) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = json.loads(Path(f"{self.switch}.done.{rank}").read_text())
        except (OSError, ValueError):
            return None
        return answer if answer.get("sequence") == self.sequence else None

    # --- the registry ------------------------------------------------------------------------------------
    def snapshots(self) -> list[Any]:
        """Return the rank snapshots of this server in the order of their tensor-parallel rank."""
        from eagle_exporter.registry.reader import RegistryReader

        found = [rank for rank in RegistryReader(REGISTRY).read().ranks if rank.labels["server"] == self.name]
        return sorted(found, key=lambda rank: int(rank.labels["tp_rank"]))

    def registry(self) -> list[dict[tuple[str, tuple[str, ...]], float]]:
        """Return for each rank all scalar values, and the sums and counts of histograms."""
        return [values_of(rank) for rank in self.snapshots()]

    def settled(self) -> list[dict[tuple[str, tuple[str, ...]], float]]:
        """Return `registry` once it stands still: answers come before the last commit, and each rank has its own."""
        last: list[Any] = []
        deadline = time.time() + _SETTLE_SECONDS
        while True:
            now = self.registry()
            # Looking around costs the hooks a little, also when nothing happens.
            counts = [{k: v for k, v in rank.items() if k[0] != "eagle_hook_host_seconds_total"} for rank in now]
            cycles = {figures.gain(rank, "eagle_cycles_total") for rank in now}
            if (counts == last and len(cycles) == 1) or time.time() > deadline:
                return now
            last = counts
            time.sleep(0.05 if self.platform.name == "cuda" else 0.4)

    # --- requests ----------------------------------------------------------------------------------------
    def request(self, batch: int, tokens: int) -> dict[str, Any]:
        """Generate, check the tokens, and return tok/s with what each rank's registry gained meanwhile."""
        self._check()
        prompts = [self.platform.prompt(index) for index in range(batch)]
        before = self.settled()
        with self._or_dead():
            begin = time.perf_counter()
            outputs = self.engine.generate(
                input_ids=prompts, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            )
            wall = time.perf_counter() - begin
        after = self.settled()
        meta = [output["meta_info"] for output in outputs]
        by_rank = [gained(old, new) for old, new in zip(before, after, strict=True)]
        return {
            "wall": wall,
            "tok_s": batch * tokens / wall,
            "tokens_right": all(
                list(output["output_ids"]) == list(self.platform.expected(prompt, tokens))
                for prompt, output in zip(prompts, outputs, strict=True)
            ),
            "verify_ct": sum(m["spec_verify_ct"] for m in meta),
            "histogram": figures.sum_lists([figures.meta_histogram(m) for m in meta]),
            "gained": by_rank[0],
            "gained_by_rank": by_rank,
        }

    @contextlib.contextmanager
    def _or_dead(self) -> Iterator[None]:
        """Serve something; an engine that raises or does not answer is not asked again."""
        try:
            with limited(_REQUEST_SECONDS, "a request"):
                yield
        except Exception as error:
            self.died = self.died or f"a request failed: {type(error).__name__}: {error}"
            raise RuntimeError(self.died) from error

    def close(self) -> None:
        """End it and take its variables back."""
        if self in self.started:
            self.started.remove(self)
        if self.died:
            _kept.append(self.engine)
        try:
            self.engine.shutdown()
        except Exception as error:  # what it has measured counts
            print(f"[{self.name}] shutdown: {type(error).__name__}: {error}", flush=True)
        self._restore()


def close_all() -> None:
    """End what a part has left running."""
    for engine in Engine.started[:]:
        engine.close()


@contextlib.contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Raise `TimeoutError` in what takes longer; in the main thread only, elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"{what} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class _Handlers:
    """In place of SGLang's ``SignalHandler``: a rank that ended makes the request fail, and this process goes on."""

    def __init__(self, engine: Engine, manager: Any) -> None:
        self._engine = engine
        self._manager = manager

    def sigterm_handler(self, *_: object) -> None:
        self._manager.gracefully_exit = True

    def running_phase_sigquit_handler(self, *_: object) -> None:
        self._engine.died = self._engine.died or "a process of the engine ended"
        asyncio.get_running_loop().stop()


def _survive_a_failed_start() -> None:
    """Let a start that fails raise: SGLang's handler would end this process (``entrypoints/engine.py``)."""
    from sglang.srt.entrypoints import engine

    original = engine.kill_process_tree
    if hasattr(original, "eagle_gpu_wrapped"):
        return

    def kill_process_tree(pid: int, include_parent: bool = True, *args: Any, **kwargs: Any) -> Any:
        if pid != os.getpid() or not include_parent:
            return original(pid, include_parent, *args, **kwargs)
        original(pid, False)
        raise RuntimeError("a process of the engine ended while it started")

    kill_process_tree.eagle_gpu_wrapped = True  # type: ignore[attr-defined]
    engine.kill_process_tree = kill_process_tree


def _end_children() -> None:
    from sglang.srt.utils import kill_process_tree

    with contextlib.suppress(Exception):
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=30)


def joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of rank 0 with those of all ranks under ``ranks``.

    Raises:
        RuntimeError: A rank failed, or the ranks are not in one mode, so that a comparison would be void.
    """
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise RuntimeError(f"rank {rank}: {answer['error']}")
    modes = [answer.get("mode") for answer in answers]
    if len(set(modes)) != 1:
        raise RuntimeError(f"the ranks are in different modes: {modes}")
    return {**answers[0], "ranks": list(answers)}


def values_of(rank: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the scalar values of a snapshot, and the sums and counts of its histograms."""
    values: dict[tuple[str, tuple[str, ...]], float] = {}
    for family in rank.families:
        for series in family.series:
            values[family.name, series.labels] = series.value
            if series.buckets:
                values[family.name + "_count", series.labels] = sum(series.buckets)
    return values


def gained(
    before: Mapping[tuple[str, tuple[str, ...]], float], after: Mapping[tuple[str, tuple[str, ...]], float]
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what changed between two readings of one rank."""
    return {key: value - before.get(key, 0.0) for key, value in after.items() if value != before.get(key, 0.0)}
