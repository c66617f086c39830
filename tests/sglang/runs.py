"""What is really run, with known answers: the one list that the tests, README and docs/compatibility.md take it from.

To run another version or configuration, add it here and let a test take it from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.sglang.measured import SGLANG, Configuration


@dataclass(frozen=True)
class Run:
    """A server of one version, whose tokens, accept lengths and phases are held to the known answers.

    Attributes:
        version: Of SGLang.
        configuration: How it speculates.
        worker: Class of SGLang that must serve it.
        launched: By ``eagle-exporter launch``, for an SGLang without a plugin system.
        data_parallel: Replicas.
        tensor_parallel: Ranks of each.
    """

    version: str
    configuration: Configuration
    worker: str = "EAGLEWorkerV2"
    launched: bool = False
    data_parallel: int = 1
    tensor_parallel: int = 1

    def __str__(self) -> str:
        parallel = [f"tp{self.tensor_parallel}"] * (self.tensor_parallel > 1)
        parallel += [f"dp{self.data_parallel}"] * (self.data_parallel > 1)
        return "-".join([self.version, self.worker, str(self.configuration), *parallel])


IN_DEPTH = (
    Run(SGLANG, Configuration()),
    Run(SGLANG, Configuration(overlap=True)),
    Run(SGLANG, Configuration(topk=4, num_draft_tokens=8)),
    Run(SGLANG, Configuration(topk=4, num_draft_tokens=8, overlap=True)),
)
"""By ``test_known_answers``: every counter."""

OTHER_VERSIONS = (
    Run("0.5.16", Configuration(overlap=True)),
    Run("0.5.18", Configuration(topk=4, num_draft_tokens=8)),
    Run("0.5.23", Configuration(topk=4, num_draft_tokens=8, overlap=True), data_parallel=2),
)
"""By ``test_versions``."""

OLD_VERSIONS = (
    Run("0.5.6", Configuration(), "EAGLEWorker", launched=True),
    Run("0.5.10", Configuration(topk=4, num_draft_tokens=8), "EAGLEWorker", launched=True, data_parallel=2),
    Run("0.5.12", Configuration(), "EAGLEWorker"),
    Run("0.5.12", Configuration(overlap=True)),
)
"""By ``test_old_versions``."""

MORE_OLD_VERSIONS = (
    Run("0.5.6", Configuration(overlap=True), launched=True),
    Run("0.5.9", Configuration(), "EAGLEWorker", launched=True),
    Run("0.5.10", Configuration(), "EAGLEWorker", launched=True),
    Run("0.5.10", Configuration(overlap=True), launched=True),
    Run("0.5.11", Configuration(), "EAGLEWorker"),
    Run("0.5.11", Configuration(overlap=True)),
    # The worker that has trees, though overlap is asked for.
    Run("0.5.12", Configuration(topk=4, num_draft_tokens=8, overlap=True), "EAGLEWorker"),
)
"""The same, by ``make soak``."""

TENSOR_PARALLEL = Run(SGLANG, Configuration(), tensor_parallel=2)
"""By ``test_beside_sglang``."""

RUNS = (*IN_DEPTH, TENSOR_PARALLEL, *OTHER_VERSIONS, *OLD_VERSIONS, *MORE_OLD_VERSIONS)
"""All of them, for the README."""


@dataclass(frozen=True)
class GpuRun:
    """What was run on a GPU machine, by ``tests/gpu``; the figures are in its ``results.json``.

    Attributes:
        version: Of SGLang.
        gpu: As ``results.json`` has it.
        configurations: How it speculated, in words.
        gpus: How many there were, a tensor-parallel rank on each.
    """

    version: str
    gpu: str
    configurations: str
    gpus: int = 1


ON_A_GPU = (
    GpuRun("0.5.16", "NVIDIA H200", "CUDA graphs, chain and tree, overlap on and off"),
    GpuRun("0.5.16", "NVIDIA H200", "CUDA graphs, chain with overlap", gpus=2),
)
