"""Starts the real SGLang server on the CPU, with or without EAGLE-3, and talks to it.

Standard library only: the interpreter that runs SGLang need not be the one that runs this.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_exporter.demo.child import SupervisedChild, log_tail

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

_DEMO = Path(__file__).resolve().parent
CPU_STANDINS = _DEMO / "cpu_standins"
"""Goes on PYTHONPATH of the server: stand-ins for sgl_kernel and torchvision."""
OVERLAP_PLUGIN = _DEMO / "overlap_plugin"
"""Goes on PYTHONPATH of the server where SGLang's CPU path needs a change, see its docstring."""


class ServerError(RuntimeError):
    """The server could not be started, ended by itself or answered with an error."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def sglang_version(python: str) -> str:
    """Version of SGLang that this interpreter would run.

    Raises:
        ServerError: the interpreter does not run or has no sglang.

    """
    script = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"cannot run the Python interpreter {python}: {error}") from error
    if done.returncode != 0:
        raise ServerError(f"sglang is not installed for {python}")
    return done.stdout.strip()


def meta_accept_histogram(meta_info: Mapping[str, Any]) -> list[int]:
    """The accept histogram of one answer: how many verify cycles accepted 0, 1, 2, ... draft tokens.

    SGLang 0.5.23 calls it ``spec_correct_drafts_histogram``, releases before also ``spec_accept_histogram``.
    Empty where no cycle ran.
    """
    for name in ("spec_correct_drafts_histogram", "spec_accept_histogram"):
        if name in meta_info:
            return list(meta_info[name])
    return []


LAUNCH = ("-m", "eagle_exporter", "launch", "--")
"""``eagle-exporter launch``, for SGLang that loads no plugins: see `SGLangServer`'s ``launcher``."""


class SGLangServer:
    """``python -m sglang.launch_server`` for the demo's model pair, as a context manager.

    Entering it starts the server and waits until it serves. Leaving it, or the death of this process, ends
    the server and everything it started.

    Args:
        model_directory: the pair, with ``target`` and ``draft`` (see ``demo.models.build_pair``).
        python: interpreter that has sglang.
        launcher: what that interpreter runs, before SGLang's own arguments.
        host: address to listen on.
        port: 0 picks a free one; see :attr:`port` afterwards.
        speculation: EAGLE-3 with the draft model, or plain decoding.
        num_steps, topk, num_draft_tokens: SGLang's ``--speculative-num-steps`` and so on.
        overlap: run the overlap event loop, which SGLang does not offer for EAGLE on the CPU (a demo plugin
            lifts that). Without it the normal loop.
        attention: arguments that choose attention backends; by default those that run EAGLE on the CPU in 0.5.16 to
            0.5.23.
        tensor_parallel, data_parallel: number of ranks, sharing this machine's cores.
        enable_metrics: SGLang's own ``/metrics``.
        warm_up: let SGLang send its warm-up request first; without it the first request is yours.
        health_generates: let ``/health`` run a one-token request as SGLang does by default. Off, it only
            tells whether the server is up, so that waiting for it leaves no trace in any count.
        plugin_path: further directories for PYTHONPATH (where a plugin's distribution lies).
        extra_args: further arguments of launch_server; they win over the ones chosen here.
        extra_env: further environment; it wins over the caller's. The caller's own ``EAGLE_EXPORTER_*``,
            ``SGLANG_*``, ``PYTHONPATH`` and ``PROMETHEUS_MULTIPROC_DIR`` do not reach the server: pass here
            what should. The exporter's registry is a directory of this server's own unless
            ``EAGLE_EXPORTER_DIR`` is given.
        log_file: receives the server's output (appended); default a temporary file that goes with the server.
        start_seconds: deadline for the start.

    """

    def __init__(
        self,
        model_directory: Path,
        *,
        python: str = sys.executable,
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
        host: str = "127.0.0.1",
        port: int = 0,
        speculation: bool = True,
        num_steps: int = 3,
        topk: int = 1,
        num_draft_tokens: int = 4,
        overlap: bool = False,
        attention: Sequence[str] | None = None,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        enable_metrics: bool = False,
        warm_up: bool = False,
        health_generates: bool = False,
        plugin_path: Sequence[Path] = (),
        extra_args: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        start_seconds: float = 180.0,
    ) -> None:
        self.model_directory = model_directory
        self.python = python
        self.launcher = list(launcher)
        self.host = host
        self.port = port
        self.speculation = speculation
        self.num_steps = num_steps
        self.topk = topk
        self.num_draft_tokens = num_draft_tokens
        self.overlap = overlap
        self.attention = None if attention is None else list(attention)
        self.tensor_parallel = tensor_parallel
        self.data_parallel = data_parallel
        self.enable_metrics = enable_metrics
        self.warm_up = warm_up
        self.health_generates = health_generates
        self.plugin_path = list(plugin_path)
        self.extra_args = list(extra_args)
        self.extra_env = dict(extra_env or {})
        self.log_file = log_file
        self.start_seconds = start_seconds
        self.ready_after_seconds: float | None = None
        self._temporary: Path | None = None
        self._child: SupervisedChild | None = None
        self._log_offset = 0

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerError: sglang is missing, the server ended, or it was not ready in time; with the end of its
            log.

        """
        self.launch()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start the server without waiting (:meth:`wait_ready` does)."""
        if self._child is not None:
            raise ServerError("the server is already running")
        version = sglang_version(self.python)
        if self.port == 0:
            self.port = free_port()
        # SGLang's sockets and metric files go there: short, a unix socket's path has 107 bytes.
        self._temporary = Path(tempfile.mkdtemp(prefix="eagle-demo-"))
        if self.log_file is None:
            self.log_file = self._temporary / "sglang.log"
        self._child = SupervisedChild(
            self._command(),
            log_file=self.log_file,
            env=self._environment(version),
            temporary=self._temporary,
        )

    def wait_ready(self) -> None:
        """Wait until ``/health`` answers 200.

        Raises:
            ServerError: as :meth:`start`.

        """
        started = time.monotonic()
        deadline = started + self.start_seconds
        while True:
            status = self._require_child().exit_status()
            if status is not None:
                raise ServerError(self._with_log(f"SGLang ended with status {status} before it was ready"))
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=30.0) as response:  # noqa: S310
                    if response.status == 200:
                        self.ready_after_seconds = time.monotonic() - started
                        return
            except (OSError, http.client.HTTPException):
                pass  # not listening yet, or 503 while it starts
            if time.monotonic() > deadline:
                raise ServerError(self._with_log(f"SGLang was not ready within {self.start_seconds:.0f} s"))
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server and all its processes; stopping twice does nothing."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            if self.log_file is not None and self.log_file.is_relative_to(temporary):
                self.log_file = None
            shutil.rmtree(temporary, ignore_errors=True)

    def is_running(self) -> bool:
        """Whether the server's main process exists."""
        return self._child is not None and self._child.exit_status() is None

    def log(self, lines: int = 10_000) -> str:
        """The end of the server's output so far."""
        return log_tail(self.log_file, lines) if self.log_file is not None else ""

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        timeout: float = 300.0,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Serve one batch of prompts through ``/generate``; may be called from several threads at once.

        Args:
            input_ids: token ids of each prompt.
            max_new_tokens: for all, or one per prompt.
            timeout: seconds for the whole batch.
            sampling: further sampling parameters (``temperature`` is 0 unless given).

        Returns:
            SGLang's answers in the order of the prompts, each with ``output_ids`` and ``meta_info``.

        Raises:
            ServerError: the server is gone or answered with an error.

        """
        limits = [max_new_tokens] * len(input_ids) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if len(limits) != len(input_ids):
            raise ValueError(f"{len(limits)} values of max_new_tokens for {len(input_ids)} prompts")
        if not input_ids:
            return []
        body = {
            "input_ids": [list(prompt) for prompt in input_ids],
            "sampling_params": [{"temperature": 0.0} | sampling | {"max_new_tokens": limit} for limit in limits],
        }
        answer = json.loads(self.request("/generate", body, timeout=timeout))
        if not isinstance(answer, list) or len(answer) != len(input_ids):
            raise ServerError(f"unexpected answer of /generate: {str(answer)[:500]}")
        return answer

    def request(self, path: str, body: object = None, *, timeout: float = 60.0) -> bytes:
        """GET ``path``, or POST it with a JSON body; returns the body of the answer.

        Raises:
            ServerError: no connection, or a status other than 200.

        """
        request = urllib.request.Request(self.url + path)  # noqa: S310
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            detail = error.read(2000).decode(errors="replace")
            raise ServerError(f"{path} answered {error.code}: {detail}") from error
        except (OSError, http.client.HTTPException) as error:
            message = f"{path}: {error}"
            raise ServerError(message if self.is_running() else self._with_log(message)) from error

    def _require_child(self) -> SupervisedChild:
        if self._child is None:
            raise ServerError("the server was not started")
        return self._child

    def _require_temporary(self) -> Path:
        if self._temporary is None:
            raise ServerError("the server was not started")
        return self._temporary

    def _with_log(self, message: str) -> str:
        tail = self.log(40)
        return f"{message}; the end of its log:\n{tail}" if tail else message

    def _command(self) -> list[str]:
        # intel_amx is the one CPU attention backend with EAGLE. Without AMX hardware SGLang rewrites
        # --attention-backend intel_amx to torch_native, with which EAGLE refuses to run; these three are not
        # rewritten and work the same in 0.5.16 to 0.5.23.
        attention = self.attention
        if attention is None:
            attention = ["--attention-backend", "torch_native"]
            if self.speculation:
                attention += ["--prefill-attention-backend", "intel_amx"]
                attention += ["--speculative-draft-attention-backend", "intel_amx"]
        command = [
            *(self.python, *self.launcher),
            *("--model-path", str(self.model_directory / "target")),
            *("--host", self.host, "--port", str(self.port)),
            *("--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--disable-cuda-graph"),
            *attention,
            *("--max-total-tokens", "32768", "--max-running-requests", "16", "--mem-fraction-static", "0.5"),
            *("--chunked-prefill-size", "2048", "--random-seed", "0"),
            # An idle scheduler would spin on a core that others need.
            "--sleep-on-idle",
            *("--tp-size", str(self.tensor_parallel), "--dp-size", str(self.data_parallel)),
        ]
        if self.speculation:
            command += [
                *("--speculative-algorithm", "EAGLE3"),
                *("--speculative-draft-model-path", str(self.model_directory / "draft")),
                *("--speculative-num-steps", str(self.num_steps)),
                *("--speculative-eagle-topk", str(self.topk)),
                *("--speculative-num-draft-tokens", str(self.num_draft_tokens)),
            ]
        if not self.overlap:
            command.append("--disable-overlap-schedule")
        if self.enable_metrics:
            command.append("--enable-metrics")
        if not self.warm_up:
            command.append("--skip-server-warmup")
        return command + self.extra_args

    def _environment(self, version: str) -> dict[str, str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EAGLE_EXPORTER_", "SGLANG_"))
            and name not in ("PYTHONPATH", "PYTHONHOME", "PROMETHEUS_MULTIPROC_DIR")
        }
        path = [CPU_STANDINS]
        if self.overlap or _needs_attention_repair(version):
            path.append(OVERLAP_PLUGIN)
        path += self.plugin_path
        environment |= {
            "PYTHONPATH": os.pathsep.join(str(directory) for directory in path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "SGLANG_USE_CPU_ENGINE": "1",
            # The models are far too small to repay a compilation: it costs 5 to 7 s at the first request.
            "TORCHDYNAMO_DISABLE": "1",
            # Nor for a second thread; with the machine's other work on the cores, threads that wait for each
            # other turn a cycle of 10 ms into one of 600 ms.
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self._require_temporary()),
            # Of its own, so that neither other servers nor what they left behind mix in.
            "EAGLE_EXPORTER_DIR": str(self._require_temporary() / "registry"),
        }
        if self.overlap:
            # gather_spec_extras of the overlap loop is a Triton kernel without a CPU branch.
            environment |= {"EAGLE_EXPORTER_DEMO_OVERLAP": "1", "TRITON_INTERPRET": "1"}
        if not self.health_generates:
            environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
        ranks = self.tensor_parallel * self.data_parallel
        if ranks > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = _cores_per_rank(ranks)
        return environment | self.extra_env


def _needs_attention_repair(version: str) -> bool:
    """Whether the overlap plugin must repair this SGLang's CPU attention (it looks at the source itself)."""
    try:
        numbers = tuple(int(part) for part in version.split(".")[:3])
    except ValueError:
        return True
    return numbers < (0, 5, 20)


def _cores_per_rank(ranks: int) -> str:
    """SGLANG_CPU_OMP_THREADS_BIND: this process's cores dealt out to the ranks, shared where too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    groups = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in group) for group in groups)
