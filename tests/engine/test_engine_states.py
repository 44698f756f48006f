"""The engine over a ledger with states: what prompts compute that share their beginnings, and what a request
takes."""

import random
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, StepPlan, StepResult
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.text.stable_boundary import chat_boundary
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.byte_model import save_model_of_family
from tests.support.chat_templates import THINKING
from tests.support.combinations import slow
from tests.support.model_worker import assert_idle
from tests.support.state_worker import make

PARAMS = SamplingParams(temperature=0.0, max_tokens=3)


def request(name: str, ids: list[int], boundary: int = 0, params: SamplingParams = PARAMS) -> Request:
    return Request(name, array("i", ids).tobytes(), params, 1, boundary=boundary)


def computed(engine: LocalEngine) -> dict[str, int]:
    """Runs all requests. Returns by name how many tokens of its prompt each has not found in the cache."""
    found = {}
    while engine.has_work:
        lengths = {name: one.num_prompt for name, one in engine.scheduler._requests.items()}
        for event in engine.step():
            assert event.error is None
            if event.num_cached is not None:
                found[event.request_id] = lengths[event.request_id] - event.num_cached
    assert_idle(engine)
    return found


@pytest.mark.parametrize("num", [400, *slow(2000)])
@pytest.mark.parametrize("depth", [2, *slow(1)])
def test_prompts_that_share_all_but_their_last_token_compute_one(depth: int, num: int) -> None:
    engine, _ = make(20_000, 60, Limits(32, 400, 2048, 3000, itl_target=0.0), depth)
    engine.add(*[request(str(number), [5] * 369 + [number + 6]) for number in range(num)])
    found = list(computed(engine).values())
    assert found[0] == 370
    assert sorted(found)[-2] <= 2


def test_a_beginning_that_all_share_stays_where_states_are_short() -> None:
    """More requests than states run; the last state is not taken from the snapshot that the others will hit."""
    engine, _ = make(20_000, 12, Limits(32, 400, 2048, 3000, itl_target=0.0))
    for number in range(200):
        params = SamplingParams(temperature=0.0, max_tokens=2 + 7 * number % 13)
        engine.add(request(str(number), [5] * 369 + [number + 6] * (1 + number % 3), params=params))
    assert sorted(computed(engine).values())[-2] <= 3


def test_a_request_takes_its_tokens_and_one_state() -> None:
    engine, worker = make(1000, 10, Limits(8, 100, 64, 1000, itl_target=0.0))
    engine.add(request("one", list(range(12))))
    engine.step()
    engine.step()
    stats = engine.stats()
    assert (stats.held, stats.held_states, stats.cached_states) == (13, 1, 1)
    assert worker.num_pieces == 1  # the snapshot before the last token costs no step
    assert computed(engine) == {}


def test_a_request_waits_for_a_state_and_says_so() -> None:
    engine, _ = make(1000, 2, Limits(8, 100, 64, 1000, itl_target=0.0))
    params = SamplingParams(temperature=0.0, max_tokens=9)
    engine.add(*[request(str(number), [number] * 12, params=params) for number in range(4)])
    for _ in range(3):
        engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.waits_for) == (2, 2, "states")
    assert computed(engine) == {"2": 12, "3": 12}


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_to_one_prompt_go_on_from_its_end(depth: int) -> None:
    engine, _ = make(1000, 12, Limits(8, 200, 64, 1000, itl_target=0.0), depth)
    ids = array("i", [3] * 50).tobytes()
    engine.add(*[Request(str(number), ids, PARAMS, number, boundary=20) for number in range(4)])
    assert computed(engine) == {"0": 50, "1": 1, "2": 1, "3": 1}
    engine.add(request("next turn", [3] * 20 + [4] * 30))
    assert computed(engine) == {"next turn": 30}


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_a_state_stands_for_what_a_step_has_read_after_the_end(reason: str) -> None:
    """A request ends while two steps are in flight, of which the second has read what the first sampled."""
    engine, worker = make(1000, 12, Limits(8, 200, 64, 1000, itl_target=0.0), 2, sample=lambda name: 11)
    engine.add(request("one", [3] * 20, params=SamplingParams(temperature=0.0, max_tokens=50)))
    for _ in range(6):
        engine.step()
    plan = engine.plan()
    assert plan is not None
    worker.launch(plan)
    assert engine.scheduler.num_in_flight == 2
    assert engine.abort("one", reason)
    length = plan.starts[0] + 1
    assert computed(engine) == {}
    engine.add(request("two", [3] * 20 + [11] * 100))
    assert computed(engine) == {"two": 120 - length}


# Tokens that a turn computes beside those of its new messages: the name of the role in the generation prompt,
# which has 9 tokens here, is one in Qwen3.5.
MOST_MORE = 16 + 8


@pytest.mark.parametrize("depth", [2, *slow(1)])
@pytest.mark.parametrize("calls", [*slow(False), True])
@pytest.mark.parametrize("thinks", [*slow(False), True], ids=["no thinking", "thinking"])
def test_a_turn_computes_its_new_messages(tmp_path: Path, thinks: bool, calls: bool, depth: int) -> None:
    """Six turns. After a tool's call the thinking of the same turn stays, and is left out in the next one."""
    tokenizer = Tokenizer(save_model_of_family(tmp_path, THINKING))
    engine, worker = make(40_000, 40, Limits(8, 20_000, 256, 1000, itl_target=0.0), depth)
    chat: list[dict[str, Any]] = []

    def render(messages: list[dict[str, Any]]) -> str:
        return tokenizer.render_chat(messages, variables={"enable_thinking": thinks})

    def length(message: dict[str, Any]) -> int:
        text = f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        return len(tokenizer.encode(text, False))

    def ask(message: dict[str, Any], thought: str, answer: str) -> int:
        """Sends a message, to which this answer is sampled. Returns how many tokens are computed."""
        chat.append(message)
        ids = tokenizer.encode(text := render(chat), False)
        boundary = chat_boundary(tokenizer, text, ids, chat, render)
        spoken = (f"{thought}\n</think>\n\n" if thinks else "") + f"{answer}<|im_end|>"
        tokens = tokenizer.encode(spoken, False).tolist()
        script = iter([*tokens, *[0] * 9])
        worker.sample = lambda name: next(script)
        params, stop = SamplingParams(temperature=0.0, max_tokens=1000), frozenset({tokens[-1]})
        engine.add(Request("turn", ids.tobytes(), params, 1, stop, boundary=boundary))
        chat.append({"role": "assistant", "content": answer, "reasoning_content": thought if thinks else ""})
        return computed(engine)["turn"]

    thought = "I think. " * 6
    previous = 0
    for turn in range(6):
        since = len(chat)
        num = ask({"role": "user", "content": f"{turn} question " * 4}, thought, f"{turn} answer " * 3)
        # The messages of the turn before are written without their thinking, which comes before them.
        new = [*chat[previous + 1 :][: since - previous - 1], chat[since]] if turn else [chat[0]]
        assert num <= sum(map(length, new)) + MOST_MORE
        if calls:
            num = ask({"role": "tool", "content": f"{turn} found " * 4}, "", f"{turn} told " * 3)
            more = len(tokenizer.encode(thought, False)) * thinks
            assert num <= length(chat[since + 1]) + length(chat[since + 2]) + more + MOST_MORE
        previous = since


NUM_SESSIONS, TURNS, QUESTION, ANSWER = 128, 12, 40, 20


@pytest.mark.slow
@pytest.mark.parametrize(("rewrites", "num_states"), [(False, NUM_SESSIONS // 3), (True, NUM_SESSIONS // 2)])
def test_sessions_hit_nearly_as_much_as_if_the_future_were_known(rewrites: bool, num_states: int) -> None:
    """Sessions begin one after the other, and pause between their turns. The pool of tokens has a third of what
    all sessions hold in the end. `rewrites`: a turn's prompt rewrites the end of the one before, and its
    answer. Such a session takes two slots while it runs, and not one: that at the boundary is the one that the
    next turn hits."""
    rng, capacity = random.Random(0), NUM_SESSIONS * TURNS * (QUESTION + ANSWER) // 3
    ledger = TokenLedger(capacity, 32, 1000, num_states=num_states)
    scheduler = Scheduler(ledger, Limits(32, 1000, 512, 1000, itl_target=0.0), 2)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER)
    texts: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
    turns = [0] * NUM_SESSIONS
    due = {one: 19 * one for one in range(NUM_SESSIONS)}  # by session: the step of its next turn
    uses: list[tuple[int, int]] = []  # the sessions, and how many tokens of each prompt the next one may hit
    plans = deque[StepPlan]()
    step = 0
    while due or scheduler.has_work:
        for one in [one for one, at in due.items() if at <= step]:
            del due[one]
            if rewrites and turns[one]:
                texts[one][-ANSWER - 2 :] = [9] * ANSWER
            texts[one] += [one + 100] + [rng.randrange(20, 50) for _ in range(QUESTION - 1)]
            length = len(texts[one])
            boundary = length - 2 if rewrites else length
            scheduler.add(request(str(one), texts[one], boundary, params))
            uses.append((one, boundary if rewrites else length + ANSWER))
        step += 1
        while (plan := scheduler.plan()) is not None:
            plans.append(plan)
        if not plans:
            continue
        plan = plans.popleft()
        for event in scheduler.complete(StepResult(plan.step, [10] * len(plan.sample), plan.num_free, 0)):
            one = int(event.request_id)
            texts[one].append(10)
            if event.finish_reason:
                turns[one] += 1
                if turns[one] < TURNS:
                    due[one] = step + int(rng.expovariate(1 / 40))
    scheduler.check()
    assert len(uses) == NUM_SESSIONS * TURNS
    assert scheduler.num_hit_tokens >= 0.95 * oracle_hits(uses, capacity, num_states)


def oracle_hits(uses: list[tuple[int, int]], capacity: int, num_states: int) -> int:
    """Returns how many tokens prompts hit if the sessions stay whose next turn comes first, as far as both
    pools have room for those that wait and those that run, in one slot each. `uses`: the session of each
    prompt, and how many tokens of it the next one may hit, in their order."""
    nexts: dict[int, list[int]] = {}
    for i, (one, _) in enumerate(uses):
        nexts.setdefault(one, []).append(i)
    kept: dict[int, int] = {}  # by session: the tokens that it has left
    hits = 0
    for one, later in uses:
        hits += kept.pop(one, 0)
        nexts[one].pop(0)
        if nexts[one]:
            kept[one] = later
        while sum(kept.values()) > capacity or len(kept) > num_states:
            del kept[max(kept, key=lambda other: nexts[other][0])]
    return hits
