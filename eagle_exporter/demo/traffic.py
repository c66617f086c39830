"""Traffic for the demo: several clients with prompts and answers of different lengths, and pauses."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from eagle_exporter.demo import answers
from eagle_exporter.demo.sglang_server import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONG_PROMPT_SHARE = 0.08
_SHORT_PROMPT_TOKENS = (4, 300)
_LONG_PROMPT_TOKENS = (1100, 3000)
_NEW_TOKENS = (16, 256)
_PAUSE_SECONDS = 0.4  # mean; with it the running batch moves between one request and all of them


class Generator(Protocol):
    """What traffic needs of a server; :class:`~eagle_exporter.demo.sglang_server.SGLangServer` has it."""

    def generate(
        self, input_ids: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], *, timeout: float = ...
    ) -> list[dict[str, Any]]:
        """Serve prompts; see SGLangServer.generate."""
        ...


@dataclass(frozen=True)
class TrafficCounts:
    """What the clients have seen so far.

    Attributes:
        requests: answers received.
        prompt_tokens: tokens of their prompts.
        output_tokens: tokens of these answers.
        wrong_answers: answers that differ from what the model pair must say.
        errors: requests without an answer.
        first_error: the first of those, or the first wrong answer, in words.

    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    wrong_answers: int = 0
    errors: int = 0
    first_error: str | None = None


class Traffic:
    """Clients in threads of their own, from :meth:`start` to :meth:`stop`.

    The requests are determined by ``seed``: client ``i`` sends the same sequence in every run (how they meet
    in SGLang's batches depends on timing).

    Args:
        server: where to send the requests.
        clients: number of concurrent clients, each with one request at a time.
        seed: of the random numbers.

    """

    def __init__(self, server: Generator, *, clients: int = 6, seed: int = 0) -> None:
        self._server = server
        self._seed = seed
        self._counts = TrafficCounts()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(i,), name=f"demo-client-{i}", daemon=True)
            for i in range(clients)
        ]

    @property
    def counts(self) -> TrafficCounts:
        """A consistent snapshot."""
        with self._lock:
            return self._counts

    def start(self) -> None:
        """Start all clients."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 30.0) -> TrafficCounts:
        """Send nothing more, wait up to ``timeout`` seconds for answers under way; the final counts."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout)
        return self.counts

    def _client(self, number: int) -> None:
        numbers = random.Random(f"{self._seed}/{number}")  # noqa: S311
        while not self._stopping.is_set():
            long = numbers.random() < _LONG_PROMPT_SHARE
            length = numbers.randint(*(_LONG_PROMPT_TOKENS if long else _SHORT_PROMPT_TOKENS))
            prompt = [numbers.randrange(answers.VOCABULARY_SIZE) for _ in range(length)]
            self._request(prompt, numbers.randint(*_NEW_TOKENS))
            self._stopping.wait(numbers.expovariate(1.0 / _PAUSE_SECONDS))

    def _request(self, prompt: list[int], max_new_tokens: int) -> None:
        try:
            output = self._server.generate([prompt], max_new_tokens, timeout=120.0)[0]["output_ids"]
        except (ServerError, KeyError) as error:
            with self._lock:
                self._counts = replace(
                    self._counts,
                    errors=self._counts.errors + 1,
                    first_error=self._counts.first_error or str(error) or repr(error),
                )
            self._stopping.wait(1.0)  # a server that is gone must not be asked in a tight loop
            return
        wrong = output != answers.expected_tokens(prompt, max_new_tokens)
        with self._lock:
            counts = self._counts
            self._counts = replace(
                counts,
                requests=counts.requests + 1,
                prompt_tokens=counts.prompt_tokens + len(prompt),
                output_tokens=counts.output_tokens + len(output),
                wrong_answers=counts.wrong_answers + wrong,
                first_error=counts.first_error
                or (f"wrong tokens after a prompt of {len(prompt)} tokens" if wrong else None),
            )
