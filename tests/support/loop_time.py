"""How long an event loop is busy in one piece, whatever else the machine does."""

import asyncio
import time
from collections.abc import Callable


async def longest_turn(until: Callable[[], bool]) -> float:
    """Returns the most seconds of the processor that the event loop's thread used in one piece, give or take a
    few milliseconds, before `until()` held."""
    longest, last = 0.0, time.thread_time()
    while not until():
        await asyncio.sleep(0.005)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    return longest
