"""One thread that does slow things for the event loop, in order."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class Worker:
    """A thread of its own.

    Unlike an executor's, the thread is a daemon: one that hangs (a registry on a network file system that is
    gone) makes its callers run into their deadline, but keeps neither the event loop nor the end of the
    process waiting.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue `work`; call this in the event loop.

        Returns:
            A future of the running loop. Cancelled before its turn, `work` is not called.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = work()
            except BaseException as error:
                _call(loop, _set_exception, future, error)
            else:
                _call(loop, _set_result, future, result)

        self._queue.put(run)
        return future

    def close(self) -> None:
        """Let the thread end after what is queued."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        # The loop is closed: nobody waits for the answer any more.
        return


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
