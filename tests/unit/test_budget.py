from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.timing import budget as module
from eagle_exporter.timing.budget import Budget


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 5000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


def run(
    budget: Budget,
    time: Time,
    cycles: int,
    *,
    cycle: float,
    timed_cost: float,
    other_cost: float = 0.0,
    prefills: float = 0.0,
    times_every: int = 1,
) -> int:
    """Run cycles as the hooks do; return how many were timed."""
    timed = 0
    for _ in range(cycles):
        is_timed = budget.time_this_cycle()
        timed += is_timed
        time.seconds += cycle
        if is_timed and timed % times_every == 0:
            budget.cycle_took(cycle)
        budget.spent(timed_cost if is_timed else 0.0, other_cost, 1, prefills=prefills)
    return timed


@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_fixed_number_times_every_nth_cycle_whatever_it_costs(time: Time, every: int) -> None:
    budget = Budget(every, now=time)
    assert run(budget, time, 7 * every * 20, cycle=0.001, timed_cost=0.000015) == 140
    assert budget.sample_every == every


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 9))
def test_it_is_known_beforehand_whether_the_next_cycle_is_timed(switches: list[bool], every: int) -> None:
    """The end of an untimed cycle is marked only when the next one is timed, so this may never be wrong."""
    budget = Budget(every, now=lambda: 0.0)
    for switch in switches:
        if switch:
            budget.set_state("off" if budget.state == "on" else "on")
        announced = budget.next_is_timed()
        assert budget.time_this_cycle() == announced


def test_automatic_sampling_times_every_cycle_when_that_is_cheap(time: Time) -> None:
    budget = Budget(None, now=time)
    assert run(budget, time, 1000, cycle=0.030, timed_cost=0.000060) == 1000
    assert budget.sample_every == 1


@pytest.mark.parametrize(
    ("cycle", "timing", "counting"),
    [(0.002, 60e-6, 0.0), (0.001, 80e-6, 0.0), (0.005, 100e-6, 15e-6), (0.006, 90e-6, 25e-6), (0.020, 150e-6, 60e-6)],
)
def test_automatic_sampling_brings_all_that_the_hooks_cost_under_the_promised_share(
    time: Time, cycle: float, timing: float, counting: float
) -> None:
    budget = Budget(None, now=time)
    run(budget, time, 20_000, cycle=cycle, timed_cost=timing, other_cost=counting)
    timed = run(budget, time, 20_000, cycle=cycle, timed_cost=timing, other_cost=counting)
    share = (timed * timing / 20_000 + counting) / cycle
    assert 0.5 * module.TARGET_SHARE <= share <= module.TARGET_SHARE
    assert budget.state == "on"


@pytest.mark.parametrize("counting", [9.6e-6, 10e-6, 40e-6])
def test_where_counting_alone_takes_the_promised_share_timing_takes_a_tenth_of_it_more(
    time: Time, counting: float
) -> None:
    budget = Budget(None, now=time)
    run(budget, time, 20_000, cycle=0.002, timed_cost=60e-6, other_cost=counting)
    timed = run(budget, time, 20_000, cycle=0.002, timed_cost=60e-6, other_cost=counting)
    share = timed * 60e-6 / (20_000 * 0.002)
    assert 0.9 * module.LEAST_TIMING_SHARE <= share <= module.LEAST_TIMING_SHARE
    assert pytest.approx(0.1 * module.TARGET_SHARE) == module.LEAST_TIMING_SHARE


def test_prefills_which_are_timed_each_change_no_sampling_and_count_for_the_fuse(time: Time) -> None:
    """Were they a cost of the timed cycles, each step to fewer of those would make the next one."""
    without, beside = Budget(None, now=time), Budget(None, now=time)
    run(without, time, 20_000, cycle=0.005, timed_cost=80e-6, other_cost=15e-6)
    run(beside, time, 20_000, cycle=0.005, timed_cost=80e-6, other_cost=15e-6, prefills=25e-6)
    assert beside.sample_every == without.sample_every > 1
    assert beside.state == "on"
    run(beside, time, 20_000, cycle=0.005, timed_cost=0.0, prefills=0.021 * 0.005)
    assert beside.state == "fuse_cost"


def test_timed_cycles_without_times_make_the_others_no_dearer(time: Time) -> None:
    whole, some, none = (Budget(None, now=time) for _ in range(3))
    run(whole, time, 20_000, cycle=0.005, timed_cost=80e-6)
    run(some, time, 20_000, cycle=0.005, timed_cost=80e-6, times_every=4)
    run(none, time, 5_000, cycle=0.005, timed_cost=80e-6, times_every=10**9)
    assert some.sample_every == whole.sample_every > 1
    assert none.sample_every == 1, "nobody knows how long its cycles are"
    run(none, time, 20_000, cycle=0.005, timed_cost=80e-6)
    assert none.sample_every == whole.sample_every


def test_what_an_idle_server_costs_is_no_cost_of_its_cycles(time: Time) -> None:
    budget = Budget(None, now=time)
    for _ in range(1000):
        run(budget, time, 1, cycle=0.010, timed_cost=20e-6, other_cost=10e-6)
        budget.spent(0.0, 500e-6, 0)
    assert budget.sample_every == 1


def test_automatic_sampling_comes_back_when_cycles_get_longer(time: Time) -> None:
    budget = Budget(None, now=time)
    run(budget, time, 5000, cycle=0.001, timed_cost=0.00008)
    assert budget.sample_every > 8
    run(budget, time, 50_000, cycle=0.030, timed_cost=0.00008)
    assert budget.sample_every == 1


def test_automatic_sampling_never_stops_timing_altogether(time: Time) -> None:
    budget = Budget(None, now=time)
    run(budget, time, 3 * module.MAX_SAMPLE_EVERY * 64, cycle=0.0001, timed_cost=0.000001, other_cost=0.000001)
    assert budget.sample_every <= module.MAX_SAMPLE_EVERY
    assert run(budget, time, 2 * module.MAX_SAMPLE_EVERY, cycle=0.0001, timed_cost=0.000001) >= 2


def test_the_fuse_stops_timing_and_leaves_acceptance_on(time: Time) -> None:
    budget = Budget(1, now=time)
    seen: list[str] = []
    budget.on_change = seen.append
    run(budget, time, 2 * 6000, cycle=0.010, timed_cost=0.0003)
    assert budget.state == "fuse_cost"
    assert seen == ["fuse_cost"]
    assert budget.counting
    assert not budget.timing
    assert not budget.time_this_cycle()


def test_the_fuse_judges_the_average_of_a_minute(time: Time) -> None:
    budget = Budget(1, now=time)
    run(budget, time, 1500, cycle=0.010, timed_cost=0.0003)  # 15 s at 3 %
    assert budget.state == "on"
    run(budget, time, 30_000, cycle=0.010, timed_cost=0.0001)  # 1 % for five minutes
    assert budget.state == "on"


def test_a_blown_fuse_holds_until_it_is_switched_on_again(time: Time) -> None:
    budget = Budget(1, now=time)
    run(budget, time, 12_000, cycle=0.010, timed_cost=0.0003)
    run(budget, time, 60_000, cycle=0.010, timed_cost=0.0, other_cost=0.0)
    assert budget.state == "fuse_cost"
    budget.set_state("on")
    assert budget.time_this_cycle()


def test_many_errors_in_a_minute_stop_everything(time: Time) -> None:
    budget = Budget(1, now=time)
    for _ in range(module.FUSE_ERRORS - 1):
        budget.error()
    assert budget.state == "on"
    budget.error()
    assert budget.state == "fuse_errors"
    assert not budget.counting
    assert not budget.timing


def test_the_same_errors_over_hours_stop_nothing(time: Time) -> None:
    budget = Budget(1, now=time)
    for _ in range(10 * module.FUSE_ERRORS):
        budget.error()
        time.seconds += module.FUSE_SECONDS / (module.FUSE_ERRORS - 2)
    assert budget.state == "on"


def test_errors_also_stop_what_a_blown_cost_fuse_left_on(time: Time) -> None:
    budget = Budget(1, now=time)
    budget.set_state("fuse_cost")
    for _ in range(module.FUSE_ERRORS):
        budget.error()
    assert budget.state == "fuse_errors"


def test_errors_after_off_do_not_switch_anything(time: Time) -> None:
    budget = Budget(1, now=time)
    budget.set_state("off")
    for _ in range(2 * module.FUSE_ERRORS):
        budget.error()
    assert budget.state == "off"


def test_switching_on_forgets_the_errors_before(time: Time) -> None:
    budget = Budget(1, now=time)
    for _ in range(module.FUSE_ERRORS):
        budget.error()
    budget.set_state("on")
    budget.error()
    assert budget.state == "on"


def test_the_states_are_those_of_the_catalogue(time: Time) -> None:
    seen: list[str] = []
    budget = Budget(1, now=time)
    budget.on_change = seen.append
    for state in catalogue.TIMING_STATES:
        budget.set_state(state)
        budget.set_state(state)
    assert seen == [state for state in catalogue.TIMING_STATES if state != "on"]
    assert [state for state in catalogue.TIMING_STATES if is_counting(state)] == ["on", "fuse_cost"]


def is_counting(state: str) -> bool:
    budget = Budget(1, now=lambda: 0.0)
    budget.set_state(state)
    return budget.counting
