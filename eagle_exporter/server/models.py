"""The JSON of ``/api/v1/cycle``. FastAPI documents it in ``/openapi.json``.

A value that is not known is null, never 0 and never a guess: a window without cycles has no milliseconds, a
rank that counts no acceptance has no accept length.
"""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict, Field


class Phase(BaseModel):
    """One phase of the cycle."""

    phase: str = Field(description="Name of the phase; the six phases are disjoint and add up to the cycle.")
    ms: float | None = Field(description="Mean milliseconds per timed cycle.")
    share: float | None = Field(description="Part of the cycle, 0 to 1.")


class Position(BaseModel):
    """Acceptance of the draft token at one position."""

    position: int = Field(description="Position in the draft, from 0; a depth for trees.")
    offered: int = Field(description="Drafts that offered a token here.")
    accepted: int = Field(description="Drafts whose token here was accepted.")
    rate: float | None = Field(description="accepted / offered, 0 to 1.")


class Cost(BaseModel):
    """What a cycle costs and yields."""

    cycles: int = Field(description="Decode cycles, timed or not.")
    timed_cycles: int = Field(description="Those that were timed: the divisor of all milliseconds.")
    cycle_ms: float | None = Field(description="Mean milliseconds of a cycle; null while a phase is not measured.")
    gap_ms: float | None = Field(description="Mean milliseconds between the end of a cycle and the next one.")
    phases: list[Phase] = Field(description="All six phases, in the order of the cycle.")
    verify_share: float | None = Field(description="Share of target_verify, 0 to 1.")
    accept_length: float | None = Field(
        description="Tokens per draft, the bonus token included: 1 + accepted / drafts."
    )


class BatchSize(Cost):
    """Cycles of one batch size and number of draft steps."""

    batch_size: str = Field(description="Rows launched on the rank, a range: 1, 2, 3-4, ... 129+.")
    num_steps: str = Field(description="Draft steps in force; 0 is plain decode.")
    tokens_per_second: float | None = Field(
        description="Tokens per second of one replica while it decodes at this batch size."
    )


class Window(Cost):
    """The last seconds: cycles with speculation, plain decode only when there is nothing else."""

    seconds: float | None = Field(description="Seconds that were really covered; less soon after a start.")
    cycles_per_second: float | None
    tokens_per_second: float | None = Field(
        description="Tokens appended to requests per second of wall time, over all replicas."
    )
    host_bound_share: float | None = Field(
        description="Timed cycles in which the GPU waited for the host, 0 to 1; null under the host clock."
    )
    positions: list[Position] = Field(description="Acceptance by position, over all batch sizes.")
    batch_sizes: list[BatchSize] = Field(description="Batch sizes and step counts with at least one cycle.")


class Rank(BaseModel):
    """One scheduler process."""

    engine_type: str
    tp_rank: str
    pp_rank: str
    dp_rank: str = Field(description="Empty without data parallelism.")
    up: bool = Field(description="The process holds its registry file.")
    recording: bool = Field(description="The rank counts acceptance: one per replica.")
    running_requests: int | None = Field(description="Requests in the running batch; null for an ended rank.")
    num_steps: int | None = Field(description="Draft steps in force now.")
    num_draft_tokens: int | None = Field(description="Tokens verified per request and cycle in force now.")
    hooks_down: list[str] = Field(description="Hooks that could not be attached to this SGLang.")
    timing_state: str | None = Field(
        description="on, off, fuse_cost, fuse_errors or hooks_down; null for an ended rank."
    )
    clock: str | None = Field(description="How times are taken: cuda_event, host or sync.")
    gpu: str | None = Field(description="Name of the GPU.")
    started: float | None = Field(description="Unix seconds at which the hooks attached.")
    last_cycle: float | None = Field(description="Unix seconds of the last cycle.")
    windows: dict[str, Window] = Field(description="10s, 1m and 5m.")


class Server(BaseModel):
    """One SGLang server."""

    # Older versions of pydantic keep names that begin with model_ for themselves.
    model_config = ConfigDict(protected_namespaces=())

    server: str
    model_name: str
    config: dict[str, str] | None = Field(description="Labels of eagle_spec_config_info; null when unknown.")
    running_requests: int | None = Field(description="Over all replicas.")
    windows: dict[str, Window] = Field(
        description="10s, 1m and 5m, pooled over the recording ranks; over all ranks when none records."
    )
    ranks: list[Rank]


class State(str, Enum):
    """The one thing to know first."""

    LIVE = "live"
    NO_TRAFFIC = "no_traffic"
    ALL_ENDED = "all_ended"
    NO_RANK = "no_rank"
    UNREADABLE = "unreadable"


class Registry(BaseModel):
    """Where the numbers come from."""

    root: str
    problem: str | None = Field(description="Why the root cannot be read.")
    files_skipped: dict[str, int] = Field(description="Files that could not be used, by reason.")


class Cycle(BaseModel):
    """The answer of ``/api/v1/cycle``."""

    version: str = Field(description="Version of the exporter.")
    taken: float = Field(description="Unix seconds of the newest reading.")
    state: State = Field(
        description="live: cycles within the last 10 s; no_traffic: ranks, but no cycle; all_ended: every "
        "rank has ended; no_rank: no rank at all; unreadable: the registry root cannot be read."
    )
    registry: Registry
    servers: list[Server]
