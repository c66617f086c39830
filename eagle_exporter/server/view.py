"""The registry as the exporter shows it: snapshots, plus how long a rank that ended is still shown."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from eagle_exporter import catalogue
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RETIREMENT_SECONDS = 300.0
"""How long counters and histograms of an ended rank stay, so that the last scrape interval is not lost."""

Life = tuple[int, int, float]
"""Device, inode and creation time of a rank's file: tells one life of a rank from the next."""


class Liveness(Enum):
    """What is shown of a rank."""

    ALIVE = "alive"
    """Everything."""
    ENDED = "ended"
    """``eagle_rank_up 0``, counters and histograms."""
    RETIRED = "retired"
    """``eagle_rank_up 0`` only, until the file is replaced or removed."""


@dataclass(frozen=True)
class RankView:
    """One rank as it is shown."""

    snapshot: RankSnapshot
    liveness: Liveness

    @property
    def life(self) -> Life:
        """Identity of this life of the rank."""
        return (*self.snapshot.inode, self.snapshot.created)


@dataclass(frozen=True)
class View:
    """The whole registry at one moment.

    Attributes:
        ranks: Sorted by their common labels.
        skipped: Number of files that could not be used, for every reason of `catalogue.SKIPPED_REASONS`.
        taken: Unix seconds.
        clock: Seconds of the monotonic clock at the same moment.
        duration: Seconds the read took.
    """

    ranks: tuple[RankView, ...]
    skipped: dict[str, int]
    taken: float
    clock: float
    duration: float


class RegistryView:
    """Reads a registry root; safe to share between threads."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare to read `root`, which need not exist yet.

        Args:
            root: The registry root.
            clock: Monotonic seconds; retirement is counted on it.
        """
        self.root = root
        self._reader = RegistryReader(root)
        self._clock = clock
        self._lock = threading.Lock()
        self._ended_since: dict[Life, float] = {}

    def read(self) -> View:
        """Read every rank.

        Raises:
            OSError: The root exists but cannot be listed.
        """
        with self._lock:
            started = time.perf_counter()
            registry = self._reader.read()
            now = self._clock()
            ranks = tuple(RankView(snapshot, self._liveness(snapshot, now)) for snapshot in registry.ranks)
            # Lives whose file is gone or replaced are forgotten; so this holds no more entries than there are
            # files.
            present = {rank.life for rank in ranks}
            self._ended_since = {life: since for life, since in self._ended_since.items() if life in present}
            counts = Counter(registry.skipped.values())
            return View(
                ranks=ranks,
                skipped={reason: counts.get(reason, 0) for reason in catalogue.SKIPPED_REASONS},
                taken=registry.taken,
                clock=now,
                duration=time.perf_counter() - started,
            )

    def _liveness(self, snapshot: RankSnapshot, now: float) -> Liveness:
        life = (*snapshot.inode, snapshot.created)
        if snapshot.alive:
            self._ended_since.pop(life, None)
            return Liveness.ALIVE
        since = self._ended_since.setdefault(life, now)
        return Liveness.ENDED if now - since < RETIREMENT_SECONDS else Liveness.RETIRED
