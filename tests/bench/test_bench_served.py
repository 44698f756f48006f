"""Processor time and memory of a server's processes, read from /proc."""

import mmap

import pytest

from bench.serving import served


def test_processor_time_of_a_process_is_read_from_the_right_fields() -> None:
    before = served.cpu_seconds(served.os.getpid())
    used = served.os.times()
    assert before == pytest.approx(used.user + used.system, abs=0.1)


def test_memory_of_a_process_is_what_it_has_touched() -> None:
    before = served._memory(served.os.getpid())
    # Pages of its own: malloc could give memory that the process has touched before.
    touched = mmap.mmap(-1, 64 * 2**20)
    for start in range(0, len(touched), mmap.PAGESIZE):
        touched[start] = 1
    after = served._memory(served.os.getpid())
    assert after.resident - before.resident == pytest.approx(len(touched), rel=0.1)
    assert after.proportional <= after.resident
