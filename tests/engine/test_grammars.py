"""Tests rows with a grammar in the engine: what they say, beside rows without one, resumed and overlapped."""

import json
import random
import re
from array import array
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from lightkv.ledger import TokenLedger
from lightkv.router import LLM, EngineConfig, InvalidParams, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import TokenEvent
from lightkv.router.model.build import assemble
from lightkv.router.model.runner import ModelRunner
from lightkv.router.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from lightkv.router.text.grammars import InvalidGrammar, RowGrammar
from tests.support.byte_model import VOCABULARY, save_byte_model
from tests.support.grammar_rows import END, SCHEMA, compile_grammars, run, tokens
from tests.support.model_worker import assert_idle
from tests.support.preempting import counted_by, expecting
from tests.support.random_schemas import random_schema

GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("choice", '["yes", "no", "it is \\"so\\"\\n"]'),
    Grammar("regex", r"\d{3}-\d{4}"),
    Grammar("lark", 'start: "a" B B "!"\nB: /[0-9]{2}/'),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))[0]


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(EngineConfig(model=str(directory), device="cpu", max_total_tokens=16_384, max_num_seqs=64))


def schema_of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def texts(llm: LLM, params: SamplingParams, prompt: str = "Once") -> list[tuple[str, str]]:
    outputs = llm.generate(prompt, params)[0].outputs
    return [(output.text, output.finish_reason) for output in outputs]


# What rows say


def assert_random_schemas_hold(llm: LLM, count: int) -> None:
    rng = random.Random(count)
    schemas: list[dict[str, Any]] = []
    while len(schemas) < count:
        schemas.append(random_schema(rng))
    params = [
        SamplingParams(
            grammar=schema_of(schema | {"x-guidance": {"whitespace_pattern": " ?"}}),
            max_tokens=450,
            temperature=i % 3 / 2,
            seed=i,
        )
        for i, schema in enumerate(schemas)
    ]
    for output, schema in zip(llm.generate(["Once"] * count, params), schemas, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop", (schema, answer.text)
        jsonschema_rs.validate(schema, json.loads(answer.text))
    assert_idle(llm.engine)


def test_answers_hold_random_schemas(llm: LLM) -> None:
    assert_random_schemas_hold(llm, 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_answers_hold_500_random_schemas(llm: LLM) -> None:
    assert_random_schemas_hold(llm, 500)


def test_an_answer_follows_a_choice_a_regex_and_a_grammar(llm: LLM) -> None:
    params = [SamplingParams(grammar=one, n=3, seed=i, max_tokens=40) for i, one in enumerate(GRAMMARS)]
    outputs = [
        [answer.text for answer in output.outputs if answer.finish_reason == "stop"]
        for output in llm.generate(["Once"] * 4, params)
    ]
    assert [len(found) for found in outputs] == [3] * 4
    assert all(jsonschema_rs.is_valid(SCHEMA, json.loads(text)) for text in outputs[0])
    assert set(outputs[1]) <= {"yes", "no", 'it is "so"\n'}
    assert all(re.fullmatch(r"[0-9]{3}-[0-9]{4}", text) for text in outputs[2])
    assert all(re.fullmatch(r"a[0-9]{4}!", text) for text in outputs[3])
    assert len(set(outputs[2])) == 3  # the answers differ


def test_any_json_object(llm: LLM) -> None:
    for text, reason in texts(
        llm, SamplingParams(grammar=Grammar("json_object"), max_tokens=30, n=4, seed=0)
    ):
        assert text.lstrip().startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_other_parameters_hold_together_with_a_grammar(llm: LLM) -> None:
    """Penalties, bias, truncation, log-probabilities, stop strings, and min_tokens, which the grammar's end
    overrules."""
    grammar = Grammar("regex", "[ab]{8}")
    for params in (
        SamplingParams(grammar=grammar, top_k=5, top_p=0.9, seed=1),
        SamplingParams(grammar=grammar, frequency_penalty=1.5, repetition_penalty=1.3, temperature=0),
        SamplingParams(grammar=grammar, logit_bias={0: 100, 290: 100}, seed=2),
        SamplingParams(grammar=grammar, min_tokens=30, max_tokens=60, seed=3),
    ):
        ((text, reason),) = texts(llm, params)
        assert re.fullmatch("[ab]{8}", text), text
        assert reason == "stop"
    stopped = texts(llm, SamplingParams(grammar=Grammar("regex", "ab{20}c"), stop="bbb", seed=4))
    assert stopped == [("a", "stop")]
    answer = llm.generate("Once", SamplingParams(grammar=grammar, logprobs=3, temperature=0))[0].outputs[0]
    assert answer.logprobs is not None
    # They are of the model's own distribution, in which the grammar's tokens are rarely the likeliest.
    assert all(len(one.top_ids) == 3 and one.logprob < 0 for one in answer.logprobs)
    assert any(token not in one.top_ids for token, one in zip(answer.token_ids, answer.logprobs, strict=True))


def test_rows_without_a_grammar_say_the_same_beside_rows_with_one(llm: LLM) -> None:
    free = [
        SamplingParams(temperature=0, max_tokens=25),
        SamplingParams(seed=5, max_tokens=25),
        SamplingParams(seed=6, top_k=20, max_tokens=25),
    ]
    alone = [output.outputs[0].token_ids for output in llm.generate(["Once"] * 3, free)]
    mixed = [one for pair in zip(free, GRAMMARS, strict=False) for one in pair]
    params = [SamplingParams(grammar=one) if isinstance(one, Grammar) else one for one in mixed]
    beside = [output.outputs[0].token_ids for output in llm.generate(["Once"] * 6, params)]
    assert beside[::2] == alone


# Grammars that are refused


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", r"[^\s\S]"), "no text matches it"),
        (Grammar("lark", "start: start"), "no text matches it"),
        (Grammar("lark", "start: missing"), 'unknown name: "missing"'),
        (Grammar("json_schema", '{"type": "foo"}'), "Invalid type: foo"),
        (Grammar("json_schema", '{"not": {}}'), "Unimplemented keys"),
        (Grammar("json_schema", "[1]"), "a JSON schema is an object"),
        (Grammar("json_schema", "{"), "Expecting"),
        (Grammar("choice", "[]"), "the list of choices is empty"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused(llm: LLM, grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidParams, match=re.escape(reason)):
        llm.generate("Once", SamplingParams(grammar=grammar))
    assert_idle(llm.engine)


def test_parameters_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidParams, match="one of the kinds"):
        SamplingParams(grammar=Grammar("xml"))
    with pytest.raises(InvalidParams, match=f"at most {MAX_GRAMMAR_BYTES} bytes"):
        SamplingParams(grammar=Grammar("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)))
    with pytest.raises(InvalidParams, match="ignore_eos"):
        SamplingParams(grammar=Grammar("regex", "a"), ignore_eos=True)


# In the engine


def make(directory: Path, pool: int, depth: int, estimates: bool) -> tuple[LocalEngine, ModelRunner]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = EngineConfig(device="cpu", max_total_tokens=pool, max_num_seqs=8, prefill_chunk=32)
    runner, info = assemble(model, config, lambda line: None, directory=directory)
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    admission = counted_by(expecting(4) if estimates else None)
    return LocalEngine(Scheduler(ledger, info.limits, depth, admission=admission), runner), runner


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[int | None]]:
    found = run(make(directory, 2000, 1, estimates=False)[0])
    assert all(event.finish_reason != "error" for events in found.values() for event in events)
    return tokens(found)


def test_two_steps_in_flight_give_the_same_tokens(
    directory: Path, expected: dict[str, list[int | None]]
) -> None:
    engine, runner = make(directory, 2000, 2, estimates=False)
    waited = []
    launch = runner.launch

    def launched(plan: Any) -> None:
        launch(plan)
        waited.append(runner._in_flight[-1].sampling is not None)

    runner.launch = launched  # type: ignore[method-assign]
    assert tokens(run(engine)) == expected
    assert sum(waited) > 10  # the sampling of these steps waited for the step before


@pytest.mark.parametrize("ruled_out_by", [{"min_tokens": 40}, {"allowed_token_ids": [64, 65]}])
def test_the_cache_has_no_end_token_that_the_device_did_not_take(
    directory: Path, ruled_out_by: dict[str, Any]
) -> None:
    """Where the end tokens are ruled out, the end of the text is known on the host alone, while the step in
    flight computes K/V of another token in its place."""
    prompt = array("i", range(60, 80))
    params = SamplingParams(max_tokens=60, temperature=0, **ruled_out_by)
    free = SamplingParams(max_tokens=12, temperature=0, logprobs=0)

    def answer(
        engine: LocalEngine, ids: bytes, params: SamplingParams, grammar: int | None = None
    ) -> list[TokenEvent]:
        engine.add(Request("a", ids, params, seed=0, stop_ids=frozenset({END}), grammar=grammar))
        events = []
        while engine.has_work:
            events += engine.step()
        return events

    engine = make(directory, 2000, 2, estimates=False)[0]
    compile_grammars(engine, [Grammar("regex", "[ab]{8}")])
    said = array("i", [event.token or 0 for event in answer(engine, prompt.tobytes(), params, 1)])
    assert said[-1] == END
    longer = (prompt + said + array("i", [65, 66])).tobytes()
    found = answer(engine, longer, free)
    assert found[0].num_cached == len(prompt) + len(said) - 1
    cold = answer(make(directory, 2000, 2, estimates=False)[0], longer, free)
    assert [event.token for event in found] == [event.token for event in cold]
    assert [event.logprobs.logprob for event in found if event.logprobs] == pytest.approx(
        [event.logprobs.logprob for event in cold if event.logprobs], abs=1e-4
    )


def test_a_resumed_row_goes_on_in_its_grammar(directory: Path, expected: dict[str, list[int | None]]) -> None:
    for depth in (1, 2):
        engine, _ = make(directory, 220, depth, estimates=True)
        assert tokens(run(engine)) == expected
        assert engine.stats().num_preemptions >= 3


def test_a_text_that_cannot_go_on_ends_alone(
    directory: Path, expected: dict[str, list[int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error names the reason; the other requests of the step go on, and every count holds."""
    engine, runner = make(directory, 2000, 2, estimates=False)
    take, left = RowGrammar.take, [20]

    def failing(grammar: RowGrammar, token: int) -> int:
        left[0] -= 1
        return take(grammar, VOCABULARY - 1 if not left[0] else token)

    monkeypatch.setattr(RowGrammar, "take", failing)
    found = run(engine)
    failed = [name for name, events in found.items() if events[-1].finish_reason == "invalid"]
    assert len(failed) == 1
    assert "could not go on" in str(found[failed[0]][-1].error)
    got = tokens(found)
    assert {name: ids for name, ids in got.items() if name not in failed} == {
        name: ids for name, ids in expected.items() if name not in failed
    }
    assert not runner.fatal


def test_tokens_that_the_grammar_rules_out_end_the_answer(directory: Path) -> None:
    """The request allows digits alone, and its grammar letters."""
    digits, prompt = [ord(one) for one in "0123456789"], array("i", range(65, 75)).tobytes()
    for temperature in (0.0, 1.0):
        engine, runner = make(directory, 2000, 2, estimates=False)
        compile_grammars(engine, [Grammar("regex", "[a-f]{20}")])
        params = SamplingParams(allowed_token_ids=digits, temperature=temperature)
        engine.add(Request("a", prompt, params, seed=1, stop_ids=frozenset({END}), grammar=1))
        events = []
        while engine.has_work:
            events += engine.step()
        assert [event.finish_reason for event in events] == ["invalid"]
        assert "could not go on" in str(events[0].error)
        assert not runner.fatal
        assert_idle(engine)


def test_a_mask_that_fails_fails_its_step_and_the_engine_goes_on(
    directory: Path, expected: dict[str, list[int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = make(directory, 2000, 2, estimates=False)
    assert runner.grammars is not None
    fill, left = runner.grammars.fill, [7]

    def failing(*args: Any) -> dict[int, str]:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("no mask")
        return fill(*args)

    monkeypatch.setattr(runner.grammars, "fill", failing)
    found = run(engine)
    errors = {str(events[-1].error) for events in found.values() if events[-1].finish_reason == "error"}
    assert errors == {"RuntimeError: no mask"}
    assert not runner.fatal
    assert tokens(run(engine)) == expected


def test_a_row_whose_grammar_is_not_compiled_fails_alone(directory: Path) -> None:
    """As that of a request that has ended while its first step was on its way."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    runner, info = assemble(model, EngineConfig(device="cpu", max_total_tokens=500), lambda line: None)
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    engine = LocalEngine(Scheduler(ledger, info.limits, 1), runner)
    ids = array("i", [1, 2, 3]).tobytes()
    engine.add(Request("free", ids, SamplingParams(max_tokens=3), seed=0))
    with pytest.raises(InvalidGrammar, match="it has no tokenizer"):
        runner.grammars.compile(1, GRAMMARS[0])
    engine.add(Request("bound", ids, SamplingParams(max_tokens=3), seed=0, grammar=1))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert [event.finish_reason for event in events if event.request_id == "free"] == [None, None, "length"]
    (failed,) = [event for event in events if event.request_id == "bound"]
    assert "it is not compiled any more" in str(failed.error)
    assert_idle(engine)


def test_an_engine_refuses_a_grammar_that_is_not_compiled(directory: Path) -> None:
    engine = make(directory, 500, 1, estimates=False)[0]
    params = SamplingParams(grammar=GRAMMARS[0], max_tokens=3)
    with pytest.raises(InvalidParams, match="an engine compiles none"):
        engine.add(Request("a", array("i", [1]).tobytes(), params, seed=0))


def test_released_grammars_leave_their_rows(directory: Path) -> None:
    engine, runner = make(directory, 2000, 2, estimates=False)
    run(engine)
    grammars = runner.grammars
    assert (len(grammars._compiled), grammars.num_rows > 0) == (3, True)
    for grammar_id in (1, 2, 3):
        grammars.release(grammar_id)
    grammars.trim()
    assert (len(grammars._compiled), grammars.num_rows) == (0, 0)


def test_a_row_lets_go_of_its_text_with_its_last_token(directory: Path) -> None:
    _, runner = make(directory, 2000, 2, estimates=False)
    grammars = runner.grammars
    grammars.compile(1, GRAMMARS[0])
    for max_tokens, num_tokens, has_ended in ((3, 2, False), (3, 3, True), (None, 3, False)):
        grammars.set_row(5, 1, b"", max_tokens)
        row = grammars.of(5)
        assert row is not None
        masks = np.zeros((1, grammars.mask_words), np.int32)
        for _ in range(num_tokens):
            assert not grammars.fill(masks, [(0, row)])
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            row.take(next(int(token) for token in allowed if token != END))
        assert row.has_ended is has_ended
    grammars.trim()
    assert grammars.num_rows == 1
    grammars.set_row(5, 1, b"", 1)
    row = grammars.of(5)
    assert row is not None
    row.drop()
    grammars.trim()
    assert grammars.num_rows == 0


def test_answers_leave_no_grammar_held(llm: LLM) -> None:
    llm.generate(["Once"] * 4, [SamplingParams(grammar=one, n=2, max_tokens=5) for one in GRAMMARS])
    next(llm.stream("Once", SamplingParams(grammar=GRAMMARS[0], max_tokens=5)))  # and is dropped
    llm.stream("Once", SamplingParams(grammar=GRAMMARS[1], max_tokens=5))  # never begins
    assert not llm._grammars._compiled
    with pytest.raises(InvalidParams):
        llm.generate(
            ["Once"] * 2, [SamplingParams(grammar=one) for one in (GRAMMARS[2], Grammar("regex", "(a"))]
        )
    assert not llm._grammars._compiled
    assert_idle(llm.engine)
