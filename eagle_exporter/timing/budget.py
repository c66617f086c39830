"""What the timing may cost: sampling, the switch, and the fuse."""

from __future__ import annotations

import time
from collections.abc import Callable

TARGET_SHARE = 0.005
"""``SAMPLE_EVERY=auto`` keeps the timing under this share of cycle time."""
FUSE_SHARE = 0.02
"""Above this share over `FUSE_SECONDS` timing stops; acceptance goes on."""
FUSE_SECONDS = 60.0
FUSE_ERRORS = 20
"""So many errors of our own within `FUSE_SECONDS` stop everything."""
MAX_SAMPLE_EVERY = 256
_ADJUST_CYCLES = 64


class Budget:
    """Decides which cycles are timed.

    Attributes:
        state: One of `catalogue.TIMING_STATES`; `set_state` alone changes it.
        timing: Cycles may be timed.
        counting: Acceptance is counted.
        sample_every: Every how many cycles one is timed now.
    """

    def __init__(self, sample_every: int | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        """Time every `sample_every`-th cycle; None adjusts it to the measured cost."""
        self.automatic = sample_every is None
        self.sample_every = sample_every or 1
        self.state = "on"
        self.timing = self.counting = True
        self.on_change: Callable[[str], None] = lambda _state: None
        self._now = now
        self._countdown = 1
        self._timed = 0
        self._cost_seconds = 0.0
        self._timed_seconds = 0.0
        self._fuse_start = now()
        self._fuse_cost = 0.0
        self._errors: list[float] = []

    def set_state(self, state: str) -> None:
        """Switch, and tell whoever shows it."""
        if state != self.state:
            self.state = state
            self.timing = state == "on"
            self.counting = state in ("on", "fuse_cost")
            self._reset_windows()
            self.on_change(state)

    def time_this_cycle(self) -> bool:
        """Return whether the cycle that begins now is timed."""
        if not self.timing:
            return False
        self._countdown -= 1
        if self._countdown > 0:
            return False
        self._countdown = self.sample_every
        return True

    def next_is_timed(self) -> bool:
        """Return whether the next cycle will be timed."""
        return self.timing and self._countdown <= 1

    def cycle_took(self, seconds: float) -> None:
        """A timed cycle, with the gap before it, took so long."""
        self._timed_seconds += seconds
        self._timed += 1

    def spent(self, seconds: float) -> None:
        """The timing spent so much host time; adjusts the sampling and blows the fuse."""
        self._cost_seconds += seconds
        self._fuse_cost += seconds
        if self._timed >= _ADJUST_CYCLES:
            if self.automatic and self._timed_seconds > 0:
                # Both sums are over timed cycles, so their ratio is the share when every cycle is timed.
                share = self._cost_seconds / self._timed_seconds
                wanted = -(-share // TARGET_SHARE)
                self.sample_every = max(1, min(MAX_SAMPLE_EVERY, int(wanted)))
            self._timed = 0
            self._cost_seconds = self._timed_seconds = 0.0
        elapsed = self._now() - self._fuse_start
        if elapsed >= FUSE_SECONDS:
            if self.state == "on" and self._fuse_cost / elapsed > FUSE_SHARE:
                self.set_state("fuse_cost")
            self._fuse_start = self._now()
            self._fuse_cost = 0.0

    def error(self) -> None:
        """One of our hooks failed; many of them stop everything."""
        now = self._now()
        self._errors = [moment for moment in self._errors if now - moment < FUSE_SECONDS]
        self._errors.append(now)
        if len(self._errors) >= FUSE_ERRORS and self.counting:
            self.set_state("fuse_errors")

    def _reset_windows(self) -> None:
        self._timed = 0
        self._cost_seconds = self._timed_seconds = self._fuse_cost = 0.0
        self._fuse_start = self._now()
        self._errors.clear()
        self._countdown = 1
