"""SGLang 0.5.6 to 0.5.12 on the CPU: they have no CPU path for EAGLE, so more stands in for more; see `STANDINS`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_exporter.demo.sglang_server import CPU_STANDINS, LAUNCH, SGLangServer
from tests.sglang import measured
from tests.sglang.runs import Run

STANDINS = Path(__file__).parent / "legacy_standins"
"""First on the server's PYTHONPATH: what CUDA's kernels and streams do. SGLang's own source stays as it is."""


def start(
    models: Path, run: Run, directory: Path, *, environment: Mapping[str, str] | None = None, **more: Any
) -> SGLangServer:
    """Return a server that is not started yet, as `measured.start` does.

    Args:
        models: The model pair.
        run: What is to run.
        directory: For log and registry.
        environment: More variables.
        more: More arguments of `measured.start`.
    """
    if run.launched:
        more["launcher"] = LAUNCH
    return measured.start(
        models,
        measured.interpreter(run.version),
        run.configuration,
        directory,
        environment={
            "PYTHONPATH": os.pathsep.join([str(STANDINS), str(CPU_STANDINS)]),
            # Kernels without a CPU branch run in Triton's interpreter.
            "TRITON_INTERPRET": "1",
            # 0.5.11 and 0.5.12 take the port plus 10000 for a server that is not asked for, and end when that is none.
            "SGLANG_GRPC_PORT": "1",
            # 0.5.11 and newer run V2 by themselves, with overlap and without trees.
            **({"SGLANG_ENABLE_SPEC_V2": "1"} if run.launched and run.worker == "EAGLEWorkerV2" else {}),
            # Of each replica's ranks; newer releases want those of all.
            **({"SGLANG_CPU_OMP_THREADS_BIND": "all"} if run.tensor_parallel == 1 else {}),
            **(environment or {}),
        },
        # The one with EAGLE that asks for no CUDA library.
        attention=["--attention-backend", "triton"],
        data_parallel=run.data_parallel,
        tensor_parallel=run.tensor_parallel,
        **more,
    )
