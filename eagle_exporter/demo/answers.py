"""What the demo's model pair must answer: every output token and every accept length, in pure Python.

The pair of :mod:`eagle_exporter.demo.models` is built from the tables of this module, so the two cannot
disagree about what was intended; whether SGLang delivers it is what a test finds out.

The target model is a fixed map: after token ``t`` its greedy next token is ``next_token(t)``. The map is one
cycle through the tokens 2 to 63; tokens 0 and 1 (the configured begin and end of a sequence) are never
generated, so no request ends before its ``max_new_tokens``.

The draft model knows the last token only, and gives it a probability distribution over the next one in which
the right token has a rank chosen here: 0 (a chain accepts it), 1 or 3 (only a tree wide enough does), or 12
(neither does). The probabilities differ from token to token, so that no two nodes of a draft tree have the
same score: SGLang's choice of nodes is dictated, on every version and device.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY_SIZE = 64
BEGIN_TOKEN = 0
END_TOKEN = 1
FIRST_GENERATED_TOKEN = 2
CONTEXT_LENGTH = 8192
"""Tokens per request, prompt and output together (``max_position_embeddings`` of both models)."""

_CYCLE_LENGTH = VOCABULARY_SIZE - FIRST_GENERATED_TOKEN
_CYCLE_STRIDE = 27  # coprime to 62: the map visits every generated token

# Rank of the right token in the draft's distribution, one letter per token in cycle order. Runs of every
# length from 0 to 9 make every accept length occur; h: rank 0, s: rank 1, f: rank 3, x: rank 12.
_RANK_PATTERN = "hhhhhhhsshhhxhshhhhhfxhhshhhhxhhhhhhsfhhhxhhhhhhhhhshhxshhhhfx"
_RANKS = {"h": 0, "s": 1, "f": 3, "x": 12}

# Unnormalised probabilities by rank: a confident head, then a tail that falls by 15 % per rank.
_HEAD_WEIGHTS = (0.62, 0.20, 0.08, 0.04)
_TAIL_WEIGHT = 0.02
_TAIL_RATIO = 0.85


def _cycle_token(position: int) -> int:
    return FIRST_GENERATED_TOKEN + _CYCLE_STRIDE * position % _CYCLE_LENGTH


_NEXT = {_cycle_token(i): _cycle_token(i + 1) for i in range(_CYCLE_LENGTH)} | {
    BEGIN_TOKEN: _cycle_token(0),
    END_TOKEN: _cycle_token(1),
}
_RANK_OF_NEXT = {_cycle_token(i): _RANKS[letter] for i, letter in enumerate(_RANK_PATTERN)} | {
    BEGIN_TOKEN: 0,
    END_TOKEN: 0,
}


def next_token(token: int) -> int:
    """The target model's greedy next token after ``token`` (0 to 63)."""
    return _NEXT[token]


@functools.cache
def draft_distribution(token: int) -> tuple[tuple[int, float], ...]:
    """The draft model's distribution after ``token``: (next token, probability), most probable first."""
    right = next_token(token)
    ranked = [(right + 7 * i) % VOCABULARY_SIZE for i in range(1, VOCABULARY_SIZE)]
    ranked.insert(_RANK_OF_NEXT[token], right)
    weights = []
    for rank in range(VOCABULARY_SIZE):
        weight = (
            _HEAD_WEIGHTS[rank]
            if rank < len(_HEAD_WEIGHTS)
            else _TAIL_WEIGHT * _TAIL_RATIO ** (rank - len(_HEAD_WEIGHTS))
        )
        # Up to 3 % per token and rank, spread by the golden ratio: products of different paths then differ.
        spread = (token * VOCABULARY_SIZE + rank) * 0.6180339887498949 % 1.0
        weights.append(weight * (1.0 + 0.03 * (2.0 * spread - 1.0)))
    total = math.fsum(weights)
    return tuple((ranked[rank], weight / total) for rank, weight in enumerate(weights))


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The ``count`` output tokens of a request with this prompt (token ids 0 to 63, not empty)."""
    tokens = []
    token = prompt[-1]
    for _ in range(count):
        token = next_token(token)
        tokens.append(token)
    return tokens


@functools.cache
def _draft_tree(
    token: int, num_steps: int, topk: int, num_draft_tokens: int
) -> tuple[frozenset[tuple[int, ...]], float]:
    """The paths SGLang offers for verification after ``token``, and how clear the choice was.

    Follows ``select_top_k_tokens`` and ``organize_draft_results`` of SGLang 0.5.20: a node's score is the
    product of the probabilities on its path; each step expands the ``topk`` best nodes of the step before by
    ``topk`` children each, all of them candidates; the best ``num_draft_tokens - 1`` candidates are offered.
    The second value is the smallest relative distance of two scores between which a choice was made.
    """
    clearance = math.inf

    def best(nodes: list[tuple[float, tuple[int, ...]]], count: int) -> list[tuple[float, tuple[int, ...]]]:
        nonlocal clearance
        ordered = sorted(nodes, reverse=True)
        if len(ordered) > count:
            clearance = min(clearance, 1.0 - ordered[count][0] / ordered[count - 1][0])
        return ordered[:count]

    beam: list[tuple[float, tuple[int, ...]]] = [
        (probability, (child,)) for child, probability in draft_distribution(token)[:topk]
    ]
    candidates = list(beam)
    for _ in range(1, num_steps):
        children = [
            (score * probability, (*path, child))
            for score, path in beam
            for child, probability in draft_distribution(path[-1])[:topk]
        ]
        candidates += children
        beam = best(children, topk)
    if len(candidates) < num_draft_tokens - 1:
        raise ValueError(
            f"a tree of {num_steps} steps with topk {topk} has {len(candidates)} nodes, "
            f"fewer than the {num_draft_tokens - 1} that {num_draft_tokens} draft tokens ask for"
        )
    return frozenset(path for _, path in best(candidates, num_draft_tokens - 1)), clearance


def accept_length(last_token: int, *, num_steps: int, topk: int, num_draft_tokens: int) -> int:
    """Tokens of one verify cycle after ``last_token``, the bonus token included: 1 to ``num_steps + 1``.

    Raises:
        ValueError: for parameters that SGLang would refuse or change (a chain, ``topk`` 1, always verifies
            ``num_steps + 1`` tokens).

    """
    if num_steps < 1 or topk < 1 or num_draft_tokens < 2:
        raise ValueError("num_steps and topk must be at least 1, num_draft_tokens at least 2")
    if topk == 1 and num_draft_tokens != num_steps + 1:
        raise ValueError(f"with topk 1 SGLang uses num_draft_tokens {num_steps + 1}, not {num_draft_tokens}")
    paths, _ = _draft_tree(last_token, num_steps, topk, num_draft_tokens)
    right_path: tuple[int, ...] = ()
    token = last_token
    while True:
        token = next_token(token)
        if (*right_path, token) not in paths:
            return len(right_path) + 1
        right_path = (*right_path, token)


def expected_accept_lengths(
    prompt: Sequence[int], max_new_tokens: int, *, num_steps: int, topk: int, num_draft_tokens: int
) -> list[int]:
    """Tokens that each verify cycle of a request accepts, the bonus token included, in order.

    The first output token comes from prefill and belongs to no cycle. The last cycle counts in full, as in
    SGLang's accept histogram, also where the request ends in the middle of what it accepted; so
    ``1 + sum(...)`` may exceed ``max_new_tokens``, and the length of the list is ``spec_verify_ct``.
    """
    lengths: list[int] = []
    token = next_token(prompt[-1])
    produced = 1
    while produced < max_new_tokens:
        length = accept_length(token, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
        lengths.append(length)
        produced += length
        for _ in range(length):
            token = next_token(token)
    return lengths


def accept_histogram(accept_lengths: Sequence[int]) -> list[int]:
    """The accept histogram as SGLang returns it in ``meta_info``.

    Entry ``i`` is the number of cycles that accepted ``i`` draft tokens (the bonus token not counted); the
    list ends with its last non-zero entry.
    """
    histogram = [0] * max(accept_lengths, default=0)
    for length in accept_lengths:
        histogram[length - 1] += 1
    return histogram


def smallest_clearance(*, num_steps: int, topk: int, num_draft_tokens: int) -> float:
    """The smallest relative distance of two scores on which the shape of any draft tree depends."""
    return min(_draft_tree(token, num_steps, topk, num_draft_tokens)[1] for token in range(VOCABULARY_SIZE))
