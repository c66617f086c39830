"""What the timing may cost: sampling, the switch, and the fuse."""

from __future__ import annotations

import time
from collections.abc import Callable

TARGET_SHARE = 0.005
"""``SAMPLE_EVERY=auto`` keeps counting and timing together under this share of cycle time."""
LEAST_TIMING_SHARE = 0.0005
"""Where counting leaves less, timing may take this share of cycle time: some cycles are always timed."""
FUSE_SHARE = 0.02
"""Above this share over `FUSE_SECONDS` timing stops; acceptance goes on."""
FUSE_SECONDS = 60.0
FUSE_ERRORS = 20
"""So many errors of our own within `FUSE_SECONDS` stop everything."""
MAX_SAMPLE_EVERY = 256
_ADJUST_CYCLES = 64
_NEVER = 1 << 62
"""Cycles until the next timed one while none is."""


class Budget:
    """Decides which cycles are timed.

    Attributes:
        state: One of `catalogue.TIMING_STATES`; `set_state` alone changes it.
        timing: Cycles may be timed.
        counting: Acceptance is counted.
        sample_every: Every how many cycles one is timed now.
        countdown: The cycle with this number from now on is timed, 1 the next one. Whoever begins a cycle while it is
            above 1 may subtract 1 instead of calling `time_this_cycle`.
    """

    def __init__(self, sample_every: int | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        """Time every `sample_every`-th cycle; None adjusts it to the measured cost."""
        self.automatic = sample_every is None
        self.sample_every = sample_every or 1
        self.state = "on"
        self.timing = self.counting = True
        self.on_change: Callable[[str], None] = lambda _state: None
        self._now = now
        self.countdown = 1
        self._begun = self._timed = 0
        self._cycles = 0
        self._timing_cost = self._counting_cost = 0.0
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
        self.countdown -= 1
        if self.countdown > 0:
            return False
        self.countdown = self.sample_every
        self._begun += 1
        return True

    def next_is_timed(self) -> bool:
        """Return whether the next cycle will be timed."""
        return self.countdown <= 1

    def cycle_took(self, seconds: float) -> None:
        """A timed cycle, with the gap before it, took so long."""
        self._timed_seconds += seconds
        self._timed += 1

    def spent(self, timing: float, counting: float, cycles: int, *, prefills: float = 0.0) -> None:
        """Take what the hooks have cost since the last call; adjusts the sampling and blows the fuse.

        Args:
            timing: Seconds of host time that only timed cycles take.
            counting: Seconds of host time that every cycle takes.
            cycles: Results that it was spent on, of timed cycles or not.
            prefills: Seconds of host time that timing prefills takes. Each is timed, so sampling cannot save it; the
                fuse can.
        """
        self._timing_cost += timing
        self._fuse_cost += timing + prefills
        if cycles:  # else it looked around while the server was idle
            self._counting_cost += counting
            self._cycles += cycles
        if self._begun >= _ADJUST_CYCLES:
            # Of some the times may be missing, so that the cost and the times have each a number of their own.
            if self.automatic and self._timed_seconds > 0 and self._cycles > 0:
                cycle = self._timed_seconds / self._timed
                room = TARGET_SHARE * cycle - self._counting_cost / self._cycles
                wanted = -(-self._timing_cost / self._begun // max(room, LEAST_TIMING_SHARE * cycle))
                self.sample_every = max(1, min(MAX_SAMPLE_EVERY, int(wanted)))
            self._begun = self._timed = self._cycles = 0
            self._timing_cost = self._counting_cost = self._timed_seconds = 0.0
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
        self._begun = self._timed = self._cycles = 0
        self._timing_cost = self._counting_cost = self._timed_seconds = self._fuse_cost = 0.0
        self._fuse_start = self._now()
        self._errors.clear()
        self.countdown = 1 if self.timing else _NEVER
