"""The few calls of the CUDA driver that the event clock makes, by ctypes.

``torch.cuda.Event.elapsed_time`` and ``query`` ask the driver in a way that takes 3.8 µs per event while the GPU has
work to do, which is whenever it matters; ``cuEventElapsedTime_v2`` (CUDA 12.8 and newer) takes under 1 µs at all times
and says whether both events are complete as well (tried by hand on an H200; tests/gpu/events.py measures it).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("eagle_exporter")

NOT_READY = 600
"""``CUDA_ERROR_NOT_READY``: an event is not complete."""


class CudaDriver:
    """Functions of ``libcuda``; they return a ``CUresult``, 0 for success.

    Attributes:
        record: ``cuEventRecord(event, stream)``.
        elapsed: ``cuEventElapsedTime_v2(where, start, end)``.
        milliseconds: Where `elapsed` leaves its reading (float32).
        where: Its address.
    """

    __slots__ = ("elapsed", "milliseconds", "record", "where")

    def __init__(self, library: Any) -> None:
        """Use `library`.

        Raises:
            AttributeError: It lacks a function: a driver older than CUDA 12.8.
        """
        self.record: Callable[[ctypes.c_void_p, ctypes.c_void_p], int] = library.cuEventRecord
        self.elapsed: Callable[[Any, ctypes.c_void_p, ctypes.c_void_p], int] = library.cuEventElapsedTime_v2
        self.milliseconds = ctypes.c_float()
        self.where = ctypes.byref(self.milliseconds)

    def complete(self, earlier: ctypes.c_void_p, later: ctypes.c_void_p) -> bool:
        """Return whether both events are complete; `milliseconds` is the time between them then. Never waits.

        Raises:
            RuntimeError: The driver refuses.
        """
        status = self.elapsed(self.where, earlier, later)
        if status == 0:
            return True
        if status == NOT_READY:
            return False
        raise RuntimeError(f"cuEventElapsedTime_v2: CUDA error {status}")

    def between(self, earlier: ctypes.c_void_p, later: ctypes.c_void_p) -> float:
        """Return milliseconds between two events that are complete.

        Raises:
            RuntimeError: They are not, or the driver refuses.
        """
        status = self.elapsed(self.where, earlier, later)
        if status:
            raise RuntimeError(f"cuEventElapsedTime_v2: CUDA error {status}")
        return self.milliseconds.value


def handle_of(event: Any) -> ctypes.c_void_p:
    """Return the handle of a ``torch.cuda.Event``, which has one from its first record on."""
    handle = event.cuda_event
    if not handle:
        raise RuntimeError("a CUDA event that was never recorded has no handle")
    return ctypes.c_void_p(handle)


def load() -> CudaDriver | None:
    """Return the driver's functions, None where they are not to be had (ROCm, an older driver).

    The library is the one that torch has loaded already. The calls hold the GIL, as torch's own do: they never wait.
    """
    import torch

    if getattr(torch.version, "hip", None):
        return None
    try:
        return CudaDriver(ctypes.PyDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        logger.info("eagle-exporter: events are read through torch, which takes longer: %s", error)
        return None
