"""The checker of grammars: it refuses what the worker could not take, its queue, and its process's end."""

import asyncio
import json
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from lightkv.router.api.grammars import check_process
from lightkv.router.api.grammars import checker as checker_module
from lightkv.router.api.grammars.check_process import (
    KILL_SECONDS,
    MAX_WORK_SECONDS,
    STACK_BYTES,
    Checked,
    check,
)
from lightkv.router.api.grammars.checker import MAX_KNOWN, MAX_WAITING, GrammarChecker
from lightkv.router.engine.grammars.fair_queue import FairQueue
from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from lightkv.router.service.router_client import RequestRefused
from lightkv.router.text.grammars import COMPILE_STACK_BYTES, InvalidGrammar, ModelTokens
from tests.support.hard_grammars import SLOW, chain

VOCAB_SIZE = 49_152
DIGITS, LETTERS = Grammar("regex", "[0-9]+"), Grammar("regex", "[a-z]+")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "cats"]


@pytest.fixture(scope="module")
def model() -> ModelTokens:
    return ModelTokens.load(resolve(DEFAULT_MODEL, lambda line: None), VOCAB_SIZE)


@asynccontextmanager
async def running() -> AsyncIterator[GrammarChecker]:
    """Yields a checker whose process has started."""
    checker = GrammarChecker(resolve(DEFAULT_MODEL, lambda line: None), lambda: VOCAB_SIZE)
    await checker.check(Grammar("regex", "start"), "field")
    try:
        yield checker
    finally:
        await checker.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of all tests that use the common checker."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner) -> Iterator[GrammarChecker]:
    context = running()
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


@pytest.fixture
def checker(runner: asyncio.Runner, shared: GrammarChecker) -> GrammarChecker:
    """The tests' common checker, which checks nothing and knows no grammar yet."""

    async def idle() -> None:
        while shared._waiting:
            await asyncio.sleep(0.01)

    runner.run(idle())
    shared._known.clear()
    return shared


def num_waiting(checker: GrammarChecker) -> int:
    """Returns how many grammars wait for their check to begin."""
    return len(checker._queue)


def slow(title: str) -> Grammar:
    return Grammar("json_schema", json.dumps({**SLOW, "title": title}))


def rules(levels: int) -> Grammar:
    """Rules of a Lark grammar that name each other, `levels` deep."""
    lines = [f'r{i}: "a" r{i + 1}' for i in range(levels)]
    return Grammar("lark", "\n".join(["start: r0", *lines, f'r{levels}: "b"']))


def tag(form: object) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


# What is refused


@pytest.mark.parametrize("deep", [chain, rules])
async def test_what_fits_in_the_checkers_stack_fits_in_the_workers(
    model: ModelTokens, deep: Callable[[int], Grammar], checker: GrammarChecker
) -> None:
    """A grammar about as deep as may pass compiles as the worker compiles it, and so does one that is a little
    deeper and is refused; the longest that a request may have is refused, too. The process lives on."""
    assert COMPILE_STACK_BYTES >= 4 * STACK_BYTES
    assert checker._process._process is not None
    pid = checker._process._process.pid

    async def passes(levels: int) -> bool:
        with suppress(InvalidGrammar):
            return await checker.check(deep(levels), "field") > 0
        with pytest.raises(InvalidGrammar, match="it nests too deeply"):
            await checker.check(deep(levels), "field")
        return False

    low, high = 50, 14_000 if deep is rules else 2_600
    assert len(deep(high).text) > 0.85 * MAX_GRAMMAR_BYTES
    assert await passes(low)
    assert not await passes(high)
    while high - low > low // 16:
        middle = (low + high) // 2
        low, high = (middle, high) if await passes(middle) else (low, middle)
    for levels in (low, high):
        assert await passes(levels) is (levels == low)
        assert not model.compile(deep(levels)).is_error()
    assert await checker.check(LETTERS, "field") > 0
    assert checker._process._process.pid == pid


def test_the_worker_compiles_the_deepest_grammar_that_a_request_may_have(model: ModelTokens) -> None:
    """Nothing sends it one, but it would not die of it."""
    for deep, levels in ((chain, 2_700), (rules, 14_500)):
        assert not model.compile(deep(levels)).is_error()


@pytest.mark.parametrize("num", [1, 4, 10])
@pytest.mark.parametrize("special", [False, True])
def test_the_checker_agrees_with_the_worker_on_excluded_texts(
    model: ModelTokens, num: int, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_process, "MAX_WORK_SECONDS", math.inf)  # which the worker does not have
    excludes = list(model.special)[:num] if special else WORDS[:num]
    grammar = tag({"type": "any_text", "excludes": excludes})
    wrong, _ = check(grammar, model)
    if wrong:
        with pytest.raises(InvalidGrammar) as refused:
            model.compile(grammar)
        assert refused.value.reason == wrong
    else:
        assert not model.compile(grammar).is_error()
    assert bool(wrong) is (num > 1 and not special)


async def test_the_checker_knows_the_models_special_tokens(
    model: ModelTokens, checker: GrammarChecker
) -> None:
    """A text that has one within it cannot be a trigger; a text of the same characters could."""
    tags = [{"type": "tag", "begin": "a<|im_end|>b", "content": {"type": "any_text"}, "end": "c"}]
    grammar = tag({"type": "triggered_tags", "triggers": ["a<|im_end|>"], "tags": tags})
    with pytest.raises(InvalidGrammar, match="special token within it"):
        await checker.check(grammar, "field")


async def test_the_checker_goes_on_after_a_grammar_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    with pytest.raises(InvalidGrammar, match="s to compile, and at most") as refused:
        await checker.check(slow("a"), "field")
    taken = re.search(r"it takes ([0-9.]+) s", refused.value.reason)  # of the processor
    assert taken is not None
    assert MAX_WORK_SECONDS < float(taken[1]) < 1.2 * KILL_SECONDS
    num_bytes = await checker.check(LETTERS, "field")
    monkeypatch.setattr(checker._process, "ask", None)
    assert await checker.check(LETTERS, "field") == num_bytes  # it is known, and the process is not asked


async def test_what_a_grammar_takes_is_measured(checker: GrammarChecker) -> None:
    small, large = chain(2), Grammar("choice", json.dumps([f"number {i * 7919}" for i in range(2000)]))
    least, most = await checker.check(small, "field"), await checker.check(large, "field")
    assert 10_000 < least < 1_500_000
    assert 2_000_000 < most < 20_000_000
    assert await checker.check(large, "field") == most  # it is known


async def test_a_model_without_a_usable_tokenizer_is_told(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path, lambda: VOCAB_SIZE)
    with pytest.raises(InvalidGrammar, match="not with this model"):
        await checker.check(LETTERS, "field")
    await checker.close()


# The process


async def test_a_check_whose_process_was_killed_is_made_again(checker: GrammarChecker) -> None:
    checking = asyncio.create_task(checker.check(DIGITS, "field"))
    while num_waiting(checker) or not checker._waiting:  # until it is taken from the queue
        await asyncio.sleep(0)
    assert checker._process._process is not None
    os.kill(checker._process._process.pid, signal.SIGKILL)
    assert await checking > 0


async def test_an_honest_grammar_whose_checks_fail_is_not_refused_for_good(
    monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    with monkeypatch.context() as busy:
        busy.setattr(checker_module, "ANSWER_SECONDS", 0.0)
        busy.setattr(checker_module, "_ATTEMPTS", 1)  # another one starts the process anew
        with pytest.raises(RequestRefused, match="try again in a moment") as refused:
            await checker.check(DIGITS, "field")
    assert refused.value.kind == "unavailable"  # 503
    assert await checker.check(DIGITS, "field") > 0


async def test_a_child_that_is_killed_is_not_the_grammars_fault(
    monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    process = checker._process._process
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while children.read_text():  # of the check that has been made
        await asyncio.sleep(0.001)
    checking = asyncio.create_task(checker.check(slow("a"), "field"))
    killed: set[str] = set()
    while len(killed) < 2:  # as many as there are attempts
        await asyncio.sleep(0.001)
        for pid in set(children.read_text().split()) - killed:
            os.kill(int(pid), signal.SIGKILL)
            killed.add(pid)
    with pytest.raises(RequestRefused, match="was ended by SIGKILL"):
        await checking


# The queue


async def test_grammars_whose_clients_hung_up_leave_the_queue(checker: GrammarChecker) -> None:
    many = [Grammar("regex", f"[a-z]{{{i}}}") for i in range(1, MAX_WAITING + 1)]
    tasks = [asyncio.create_task(checker.check(one, "field")) for one in many]
    await asyncio.sleep(0)
    assert num_waiting(checker) > MAX_WAITING // 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert num_waiting(checker) == 0
    await checker.check(DIGITS, "field")
    assert len(checker._waiting) == 0


async def test_one_check_serves_all_that_ask_for_the_same_grammar(checker: GrammarChecker) -> None:
    first = asyncio.create_task(checker.check(LETTERS, "field"))
    others = [asyncio.create_task(checker.check(LETTERS, "field")) for _ in range(4 * MAX_WAITING)]
    await asyncio.sleep(0)
    first.cancel()  # the others still wait for it
    assert len(set(await asyncio.gather(*others))) == 1


async def test_a_grammar_that_waits_behind_another_clients_does_not_hold_up_a_second_client(
    checker: GrammarChecker,
) -> None:
    many = [Grammar("regex", f"[b-x]{{{i}}}") for i in range(1, 11)]
    tasks = [asyncio.create_task(checker.check(one, "field", b"greedy")) for one in many]
    await asyncio.sleep(0)
    await checker.check(many[-1], "field", b"honest")
    assert sum(task.done() for task in tasks) < 5
    await asyncio.gather(*tasks)


async def test_beyond_its_bound_the_queue_refuses(
    monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    assert checker._queue._max_waiting == MAX_WAITING
    monkeypatch.setattr(checker, "_queue", FairQueue(8))  # as many checks as the real one would take seconds
    many = [Grammar("regex", f"[a-z]{{{i}}}") for i in range(1, 18)]
    tasks = [asyncio.create_task(checker.check(one, "field", b"greedy")) for one in many]
    await asyncio.sleep(0)
    honest = asyncio.create_task(checker.check(DIGITS, "field", b"honest"))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [one for one in found if isinstance(one, RequestRefused)]
    assert {one.kind for one in refused} == {"queue_full"}  # 429
    assert len(refused) >= 9
    assert await honest > 0


async def test_what_waits_is_refused_when_the_checker_closes(checker: GrammarChecker) -> None:
    many = [Grammar("regex", f"[a-z]{{{i}}}") for i in range(1, 9)]
    tasks = [asyncio.create_task(checker.check(one, "field")) for one in many]
    await asyncio.sleep(0)
    await checker.close()
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert {str(one) for one in found} == {"the service is shutting down"}
    assert num_waiting(checker) == len(checker._waiting) == 0
    assert await asyncio.wait_for(checker.check(DIGITS, "field"), 60) > 0  # in another process


async def test_checks_before_the_service_is_ready_are_refused_and_later_ones_made(
    monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    is_ready = False
    await checker.close()  # as if no grammar had been checked yet

    def vocab_size() -> int:
        if not is_ready:
            raise RequestRefused("unavailable", "starting: loading the model")
        return VOCAB_SIZE

    monkeypatch.setattr(checker._process, "_vocab_size", vocab_size)
    many = [Grammar("regex", f"[a-z]{{{i}}}") for i in range(1, 5)]
    tasks = [checker.check(one, "field") for one in many]
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert {str(one) for one in found} == {"starting: loading the model"}
    assert all(isinstance(one, RequestRefused) for one in found)
    is_ready = True
    assert await checker.check(many[0], "field") > 0


async def test_an_unforeseen_error_refuses_one_check_and_not_those_behind_it(
    monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    ask = checker._process.ask

    async def fail(grammar: Grammar) -> Checked:
        if grammar == DIGITS:
            raise RuntimeError("for the test")
        return await ask(grammar)

    monkeypatch.setattr(checker._process, "ask", fail)
    tasks = [checker.check(one, "field") for one in (DIGITS, LETTERS)]
    failed, num_bytes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert isinstance(failed, RequestRefused)
    assert failed.kind == "unavailable"
    assert isinstance(num_bytes, int)


async def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker) -> None:
    assert MAX_KNOWN < 10_000
    monkeypatch.setattr(checker_module, "MAX_KNOWN", 2)
    for i in range(3):
        await checker.check(Grammar("regex", f"[a-z]{{{i}}}"), "field")
    assert len(checker._known) == 2
    assert all(len(one) == 32 for one in checker._known)  # hashes
