"""A measured server, the requests it is sent, and what must come of them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_exporter import catalogue
from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import SGLangServer, meta_accept_histogram
from eagle_exporter.registry.layout import context_length_index
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader

ROOT = Path(__file__).resolve().parents[2]
SGLANG = "0.5.20"


def interpreter(version: str = SGLANG) -> str:
    """Return the interpreter of an environment with SGLang.

    Raises:
        FileNotFoundError: It was not made; the message says how.
    """
    path = Path(os.environ.get("EAGLE_EXPORTER_TEST_PYTHON") or ROOT / f".venvs/sglang-{version}/bin/python")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run: python3 .ci/environment.py sglang=={version}")
    return str(path)


@dataclass(frozen=True)
class Configuration:
    """How a server speculates."""

    topk: int = 1
    num_draft_tokens: int = 4
    overlap: bool = False
    num_steps: int = 3

    def __str__(self) -> str:
        return f"topk{self.topk}-{'overlap' if self.overlap else 'normal'}"


Request = tuple[Sequence[int], int]
"""A prompt and the number of tokens asked for."""


def prompt(length: int, last: int) -> list[int]:
    """Return a prompt that no other one is a prefix of (SGLang would take it from its cache)."""
    return [(7 * i + last) % answers.VOCABULARY_SIZE for i in range(length - 1)] + [last]


ALONE: list[Request] = [
    (prompt(3, 20), 24),
    (prompt(1100, 33), 17),  # the second context length
    (prompt(2500, 12), 9),  # longer than a chunk of the prefill
    (prompt(4, 9), 1),  # ends with its prefill
    (prompt(5, 44), 2),
]
"""Sent one after the other: every cycle has one row."""

TOGETHER: list[Request] = [
    (prompt(6, 20), 24),
    (prompt(5, 11), 40),
    (prompt(2, 30), 7),
    (prompt(7, 41), 13),
    (prompt(900, 57), 64),
    (prompt(8, 5), 1),
    (prompt(1020, 21), 33),  # crosses into the next context length on its way
    (prompt(9, 62), 5),
]
"""Sent at once: they end at different times."""


@dataclass
class Expected:
    """What a set of requests must add to the counters, by the construction of the models."""

    requests: int
    cycles_with_rows: int
    drafts: int
    draft_tokens: int
    accepted: int
    output: int
    accepted_per_position: list[int]
    accept_lengths: list[int]
    context_drafts: dict[str, int]
    context_accepted: dict[str, int]
    context_tokens: int


def expect(requests: Sequence[Request], configuration: Configuration) -> Expected:
    """Return what the construction dictates."""
    every: list[int] = []
    contexts: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    context_tokens = 0
    for tokens, count in requests:
        lengths = answers.expected_accept_lengths(
            tokens,
            count,
            num_steps=configuration.num_steps,
            topk=configuration.topk,
            num_draft_tokens=configuration.num_draft_tokens,
        )
        context = len(tokens) + 1
        for length in lengths:
            label = catalogue.CONTEXT_LENGTHS[context_length_index(context)]
            contexts[label] += 1
            accepted[label] += length - 1
            context_tokens += context
            context += length
        every += lengths
    positions = range(configuration.num_steps)
    return Expected(
        requests=len(requests),
        cycles_with_rows=len(every),
        drafts=len(every),
        draft_tokens=len(every) * (configuration.num_draft_tokens - 1),
        accepted=sum(every) - len(every),
        output=sum(count for _, count in requests),
        accepted_per_position=[sum(length - 1 > position for length in every) for position in positions],
        accept_lengths=[every.count(length) for length in range(1, configuration.num_steps + 2)],
        context_drafts={label: contexts[label] for label in catalogue.CONTEXT_LENGTHS},
        context_accepted={label: accepted[label] for label in catalogue.CONTEXT_LENGTHS},
        context_tokens=context_tokens,
    )


def start(
    models: Path,
    python: str,
    configuration: Configuration | None,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> SGLangServer:
    """Return a server that is not started yet, with its registry in ``directory / "registry"``.

    Args:
        models: The model pair.
        python: Interpreter with SGLang.
        configuration: None for plain decoding.
        directory: For log and registry.
        environment: More variables.
        more: More arguments of `SGLangServer`.
    """
    speculation = (
        {"speculation": False}
        if configuration is None
        else {
            "topk": configuration.topk,
            "num_draft_tokens": configuration.num_draft_tokens,
            "num_steps": configuration.num_steps,
            "overlap": configuration.overlap,
        }
    )
    return SGLangServer(
        models,
        python=python,
        log_file=directory / "sglang.log",
        extra_env={
            "EAGLE_EXPORTER_DIR": str(directory / "registry"),
            "EAGLE_EXPORTER_SERVER": "tested",
            "EAGLE_EXPORTER_EMBED": "0",
            "EAGLE_EXPORTER_SAMPLE_EVERY": "1",
            **(environment or {}),
        },
        start_seconds=400.0,
        **speculation,
        **more,
    )


def send_alone(server: SGLangServer, requests: Sequence[Request] = ALONE) -> list[dict[str, Any]]:
    """Send requests one after the other."""
    return [server.generate([tokens], count)[0] for tokens, count in requests]


def send_together(server: SGLangServer, requests: Sequence[Request] = TOGETHER) -> list[dict[str, Any]]:
    """Send requests at once."""
    return server.generate([tokens for tokens, _ in requests], [count for _, count in requests])


def one_rank(root: Path) -> RankSnapshot:
    """Return the only rank of a registry."""
    snapshot = RegistryReader(root).read()
    assert snapshot.skipped == {}
    (rank,) = snapshot.ranks
    return rank


def accept_histogram(replies: Sequence[Mapping[str, Any]], length: int) -> list[int]:
    """Return SGLang's own word: how many cycles accepted 0, 1, ... up to `length` - 1 draft tokens."""
    histogram = [0] * length
    for reply in replies:
        for accepted, count in enumerate(meta_accept_histogram(reply["meta_info"])):
            histogram[accepted] += count
    return histogram


def settled(root: Path) -> RankSnapshot:
    """Return the rank once the scheduler is idle and its numbers stand still: answers arrive before the last commit."""
    rank = one_rank(root)
    still = 0
    for _ in range(600):
        time.sleep(0.05)
        now = one_rank(root)
        still = still + 1 if _counts(now) == _counts(rank) and now.value("eagle_running_requests") == 0 else 0
        rank = now
        # The scheduler looks around every 0.25 s when it is idle.
        if still >= 8:
            return rank
    raise TimeoutError("the scheduler does not come to rest")


def numbers(rank: RankSnapshot) -> dict[tuple[str, tuple[str, ...]], tuple[float, ...]]:
    """Return every value of a rank."""
    return {
        (family.name, series.labels): (series.value, *series.buckets)
        for family in rank.families
        for series in family.series
    }


def _counts(rank: RankSnapshot) -> dict[tuple[str, tuple[str, ...]], tuple[float, ...]]:
    # Looking around costs the hooks a little, also when nothing happens.
    return {key: value for key, value in numbers(rank).items() if key[0] != "eagle_hook_host_seconds_total"}


class Difference:
    """What was counted between two snapshots of one rank."""

    def __init__(self, before: RankSnapshot, after: RankSnapshot) -> None:
        assert before.inode == after.inode, "the rank was restarted"
        self._before, self._after = numbers(before), numbers(after)
        self.after = after

    def __call__(self, name: str, *labels: str) -> float:
        """Return the increase of one scalar series."""
        key = (name, labels)
        return self._after[key][0] - self._before.get(key, (0.0,))[0]

    def total(self, name: str, keep: Callable[[tuple[str, ...]], bool] = lambda _labels: True) -> float:
        """Return the increase of a family, summed over its series."""
        return sum(self(key, *labels) for key, labels in self._after if key == name and keep(labels))

    def labels(self, name: str) -> list[tuple[str, ...]]:
        """Return the labels of every series of a family."""
        return [labels for key, labels in self._after if key == name]

    def by_label(self, name: str) -> dict[str, float]:
        """Return the increase of each series of a family with one label."""
        return {labels[0]: self(key, *labels) for key, labels in self._after if key == name}

    def buckets(self, name: str, *labels: str) -> list[int]:
        """Return the increase of each bucket of a histogram, not cumulative, +Inf last."""
        key = (name, labels)
        before = self._before.get(key, (0.0,) * len(self._after[key]))
        return [int(new - old) for old, new in zip(before[1:], self._after[key][1:], strict=True)]
