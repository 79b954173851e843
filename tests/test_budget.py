"""Budgets and clocks: what is spent, what is left, and how a clock splits itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdp.budget import Budget, Clock, Pace, has_time
from gdp.errors import InputError

SHARES = st.floats(0.0, 1.0)


class Timer:
    """A clock's seconds, set by hand."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


@given(st.integers(0, 10**6), SHARES, SHARES, st.integers(0, 10**6))
def test_parts_lie_within_their_clock_and_count_for_it(limit: int, first: float, second: float, spent: int) -> None:
    """A part of a part ends no later than the whole, and its simulations are the whole's."""
    clock = Clock(Budget(simulations=limit))
    part = clock.part(first).until(second)
    assert part.simulations_left is not None
    assert part.simulations_left <= first * limit + 1
    part.spend(spent)
    assert clock.simulations == part.simulations == spent
    assert clock.simulations_left == max(limit - spent, 0)
    assert clock.is_up == (spent >= limit)
    assert clock.at_most(10) == min(10, max(limit - spent, 0))


def test_a_clock_counts_the_seconds_of_its_timer() -> None:
    """10 s, of which 4 are over: a half of the rest ends at 7, a half of the whole at 5."""
    timer = Timer()
    clock = Clock(Budget(seconds=10.0), timer=timer)
    timer.now_s += 4.0
    assert (clock.seconds, clock.seconds_left, clock.share_spent) == (4.0, 6.0, 0.4)
    half, first_half = clock.part(0.5), clock.until(0.5)
    assert (half.seconds_left, first_half.seconds_left) == (3.0, 1.0)
    assert clock.simulations_left is None
    assert clock.at_most(7) == 7
    timer.now_s += 2.0
    assert first_half.is_up
    assert not half.is_up
    assert half.share_spent == pytest.approx(2 / 3)
    assert clock.rest == Budget(seconds=4.0)


def test_stop_ends_all_parts() -> None:
    """An event set anywhere ends every part."""
    clock = Clock(Budget(seconds=1e6))
    part = clock.part(0.5)
    clock.stop.set()
    assert part.is_up


def test_a_clock_without_a_budget_never_ends() -> None:
    """No time and no simulation ends it or a part of it, but a stop does."""
    now = [0.0]
    clock = Clock(None, timer=lambda: now[0])
    clocks = clock, clock.part(0.5), clock.before(3.0)
    now[0] = 1e12
    clock.spend(10**9)
    assert all(each.has(1e9) and not each.is_up and each.simulations_left is None for each in clocks)
    clock.stop.set()
    assert all(each.is_up for each in clocks)


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1.5sims", "soon", "1e3s"])
def test_what_is_no_budget(text: str) -> None:
    """Bad texts are one clear error."""
    with pytest.raises(InputError, match="budget is"):
        Budget.parse(text)


def test_a_clock_ends_earlier_or_not_before_some_seconds() -> None:
    """`before` ends a clock some seconds earlier, and `at_least` leaves it at least some seconds."""
    now = [0.0]
    clock = Clock(Budget(seconds=10.0), timer=lambda: now[0])
    assert clock.before(3.0).seconds_left == 7.0
    now[0] = 9.0
    assert clock.before(3.0).seconds_left == 0.0
    assert clock.at_least(2.0).seconds_left == 2.0
    assert clock.at_least(0.5).seconds_left == 1.0


def test_seconds_do_not_end_a_clock_that_counts_simulations() -> None:
    """Seconds do not limit a clock that counts simulations or no clock at all, but a stop leaves no time."""
    clock = Clock(Budget(simulations=10))
    assert clock.before(3.0).simulations_left == clock.at_least(3.0).simulations_left == 10
    assert has_time(clock, 1e9)
    clock.stop.set()
    assert not has_time(clock)
    assert has_time(None, 1e9)


def test_a_pace_is_that_of_the_largest_step() -> None:
    """100 ops take 1 s, then 10 ops 5 s, which no larger step is judged by; 200 ops take 3 s."""
    timer, pace = Timer(), Pace(op_us=7.0)
    clock = Clock(Budget(seconds=100.0), timer=timer)
    assert pace.seconds(10**6) == pytest.approx(7.0)
    for num_ops, seconds, of_1000 in [(100, 1.0, 10.0), (10, 5.0, 10.0), (200, 3.0, 15.0)]:
        with pace.measured(num_ops, clock):
            timer.now_s += seconds
        assert pace.seconds(1000) == pytest.approx(of_1000)
