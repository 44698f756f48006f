"""A call is overdue after its own time, without the time in which this process did not run."""

from lightkv.router.service.call_watch import STOPPED_SECONDS, CallWatch


class Clock:
    """A clock in seconds, which the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def passed(watch: CallWatch, clock: Clock, seconds: float) -> bool:
    """Calls `look` at every tick for `seconds`. Returns whether a call is overdue at the end."""
    end = clock.now + seconds
    overdue = False
    while clock.now < end:
        clock.now = min(clock.now + watch.tick_seconds, end)
        overdue = watch.look()
    return overdue


def test_only_a_waiting_call_is_overdue_after_its_limit() -> None:
    clock = Clock()
    watch = CallWatch(10.0, clock)
    assert not passed(watch, clock, 30)
    watch.begin()
    assert not passed(watch, clock, 10)
    assert passed(watch, clock, 0.5)
    watch.end()
    assert not passed(watch, clock, 30)
    watch.begin()  # each call has the whole limit
    assert not passed(watch, clock, 10)


def test_announced_work_extends_the_limit() -> None:
    clock = Clock()
    watch = CallWatch(10.0, clock)
    watch.postpone(600.0)  # without a waiting call this has no effect
    watch.begin()
    assert not passed(watch, clock, 9)
    watch.postpone(600.0)
    assert not passed(watch, clock, 599)
    assert watch.allowed == 600
    watch.postpone()
    assert not passed(watch, clock, 10)
    assert passed(watch, clock, 1)
    assert watch.allowed == 10


def test_announced_work_does_not_shorten_a_longer_limit() -> None:
    clock = Clock()
    watch = CallWatch(1800.0, clock)
    watch.begin()
    watch.postpone(600.0)
    assert not passed(watch, clock, 1800)
    assert passed(watch, clock, 1)


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    watch = CallWatch(10.0, clock)
    watch.begin()
    assert not passed(watch, clock, 9)
    clock.now += 3600
    assert not watch.look()
    assert not passed(watch, clock, 10)
    assert passed(watch, clock, 1)


def test_short_stops_do_not_add_up() -> None:
    clock = Clock()
    watch = CallWatch(3.0, clock)
    watch.begin()
    for _ in range(10):
        clock.now += 1.9
        assert not watch.look()
    assert passed(watch, clock, 3.1)


def test_a_short_limit_is_kept_too() -> None:
    clock = Clock()
    watch = CallWatch(0.2, clock)
    assert watch.tick_seconds < 0.2 < STOPPED_SECONDS
    watch.begin()
    assert not passed(watch, clock, 0.19)
    assert passed(watch, clock, 0.1)
