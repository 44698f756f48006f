"""Tests what a plan contains for the sampler: each prompt once, and end tokens until they are allowed."""

import msgspec
import pytest

from lightkv.router import LLM, SamplingParams
from lightkv.router.engine.plan_writer import NewRows
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import StepPlan
from lightkv.router.sampling_params import MAX_END_IDS, InvalidParams
from tests.support.recorded_steps import saved
from tests.support.scheduled import VOCABULARY, ids, make

LONG = [1 + i % (VOCABULARY - 1) for i in range(1200)]


def plans_of(requests: list[Request]) -> list[StepPlan]:
    engine, worker = make(capacity=9000, max_num_seqs=64, max_model_len=6000, prefill_chunk=512)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return worker.plans


def penalised(name: str, prompt: list[int]) -> Request:
    return Request(name, ids(prompt), SamplingParams(max_tokens=3, repetition_penalty=1.1), seed=1)


def test_answers_to_one_prompt_share_it_in_the_plan() -> None:
    """The plan contains the prompt's distinct ids, so that a plan stays small however long the prompt is."""
    plans = plans_of([penalised(str(i), LONG) for i in range(12)] + [penalised("other", [9, 2, 9])])
    rows = [(plan, row) for plan in plans for row in plan.new_rows]
    assert len(rows) == 13
    for plan, row in rows:
        assert row.prompt_idx is not None
        expected = sorted(set(LONG)) if row != rows[-1][1] else [2, 9]
        assert plan.prompts[row.prompt_idx] == ids(expected)
        assert row.output_ids == b""
    assert all(len(plan.prompts) == len(set(plan.prompts)) for plan in plans)
    assert max(len(msgspec.msgpack.encode(plan)) for plan in plans) < 4 * len(LONG) * 12 // 4


def test_prompts_are_sent_only_for_penalties() -> None:
    plain = Request("a", ids(LONG[:50]), SamplingParams(max_tokens=3), seed=1)
    plans = plans_of([plain])
    assert [row.prompt_idx for plan in plans for row in plan.new_rows] == [None]
    assert not any(plan.prompts for plan in plans)


def test_end_tokens_are_sent_until_the_answer_may_end() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=4)
    asked = Request("a", ids([1, 2, 3]), params, seed=1, stop_ids=frozenset({7, 5, VOCABULARY + 1}))
    (row,) = plans_of([asked])[0].new_rows
    assert (row.may_stop_at, row.stop_ids) == (3 + 4, [5, 7])  # one that is not in the vocabulary never comes
    for num_output, expected in ((2, 7), (4, 0)):  # a request that was preempted and runs again
        again = Request("b", ids([1, 2, 3]), params, seed=1, stop_ids=frozenset({7}))
        again.output.extend([10] * num_output)
        new_rows = NewRows(VOCABULARY)
        new_rows.add(again, row=1)
        ((row,), prompts) = new_rows.drain()
        assert (row.may_stop_at, prompts) == (expected, [])


def test_more_end_tokens_than_can_be_held_back_are_refused() -> None:
    engine, _ = make()
    params = SamplingParams(max_tokens=9, min_tokens=4)
    asked = Request("a", ids([1]), params, seed=1, stop_ids=frozenset(range(MAX_END_IDS + 1)))
    with pytest.raises(InvalidParams, match="min_tokens"):
        engine.add(asked)
    assert not engine.has_work


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_does_not_end_before_min_tokens(
    tmp_path_factory: pytest.TempPathFactory, temperature: float
) -> None:
    llm = LLM(saved(tmp_path_factory.mktemp("model")))
    stops = list(range(0, 64, 2))  # half of the vocabulary
    params = [
        SamplingParams(
            max_tokens=20, min_tokens=least, stop_token_ids=stops, temperature=temperature, seed=least
        )
        for least in (0, 1, 5, 19, 20)
    ]
    for output, wanted in zip(llm.generate([[5, 6, 7]] * len(params), params), params, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) >= wanted.min_tokens
        assert not set(tokens[: wanted.min_tokens]) & set(stops)
        ends = [place for place, token in enumerate(tokens) if token in stops]
        assert ends in ([], [len(tokens) - 1])
        assert (len(tokens) == 20) or ends
    llm.check()
