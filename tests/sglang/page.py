"""Asking an exporter and a server, for the tests of life with a real server."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import SGLangServer
from tests.sglang.measured import Configuration

TREE = Configuration(topk=4, num_draft_tokens=8, overlap=True)
PROMPT, COUNT = [5, 44, 17], 30
"""One request whose answer is known."""


def scrape(port: int) -> str:
    """GET /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=15) as response:
        content: bytes = response.read()
    return content.decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of an exposition; fails when one comes twice."""
    result: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in result, f"{key} comes twice"
            result[key] = sample.value
    return result


def value(text: str, name: str, **labels: str) -> float:
    """Return the sum over the samples of a name that have these labels; -1 when there is none."""
    found = [
        number
        for (sample, pairs), number in samples(text).items()
        if sample == name and labels.items() <= dict(pairs).items()
    ]
    return sum(found) if found else -1.0


def answer_is_right(server: SGLangServer, count: int = COUNT) -> bool:
    """Send one request; return whether the tokens are the known ones."""
    (reply,) = server.generate([PROMPT], count)
    tokens: list[int] = reply["output_ids"]
    return tokens == answers.expected_tokens(PROMPT, count)


def reachable(port: int) -> bool:
    """Return whether /metrics answers."""
    try:
        return bool(scrape(port))
    except OSError:
        return False
