"""Sends Ctrl-C at random times while answers are generated: it aborts these answers and nothing else. Times are
those of the processor, which a busy machine does not change."""

import os
import random
import signal
import threading
import time

import pytest

from lightkv.router import LLM, SamplingParams
from lightkv.router.llm import interrupts_deferred
from tests.support.recorded_steps import saved

ROUNDS = 12
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=1, n=2, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8, 9, 10], [20] * 30]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(saved(tmp_path_factory.mktemp("model")))


def interrupted(llm: LLM, seconds: float) -> bool:
    """Generates answers, and sends this process Ctrl-C once it has used so many seconds of the processor for
    them. Returns whether it interrupted them."""
    over = threading.Event()
    end = time.process_time() + seconds

    def press() -> None:
        while not over.wait(0.0005):
            if time.process_time() >= end:
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=press)
    try:
        thread.start()
        llm.generate(PROMPTS, PARAMS)
        over.set()
        thread.join()
        time.sleep(0.001)  # a Ctrl-C sent at the last moment is raised here
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False


def test_an_engine_continues_after_any_interrupt(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, PARAMS)
    started = time.process_time()
    llm.generate(PROMPTS, PARAMS)
    whole = time.process_time() - started
    rng = random.Random(0)
    num_interrupted = 0
    for _ in range(ROUNDS):
        num_interrupted += interrupted(llm, rng.uniform(0, whole / 2))
        llm.check()
        stats = llm.stats()
        assert (stats.held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert num_interrupted > ROUNDS / 4
    assert [one.outputs for one in llm.generate(PROMPTS, PARAMS)] == [one.outputs for one in expected]


def test_an_interrupt_is_passed_to_the_previous_handler_at_the_end_of_the_block() -> None:
    seen: list[str] = []

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["went on"]
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append("handled"))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            seen.append("still went on")
        assert seen == ["went on", "still went on", "handled"]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_the_handler_is_not_replaced() -> None:
    handlers = []

    def work() -> None:
        with interrupts_deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
