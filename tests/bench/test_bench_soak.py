"""The requests of the soak benchmark, and its checks, each of which fails on a faulty service."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from bench.serving import soak
from bench.serving.load_client import Reply, RequestFailed
from bench.serving.served import Memory
from bench.serving.soak import Growth, Outcome, Sample
from bench.serving.soak_requests import CHATS, COMPLETIONS, Answer, Invalid, invalid_calls, read_answer
from tests.support.served import save_tiny_model

VOCABULARY, CONTEXT = 500, 256
MIB = 2**20


class FakeService:
    """A service that answers correctly except for `fault`."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.is_loaded = False  # no fault shows before the clients begin
        self._num_loads = 0
        self._num_steps = 0
        invalid = invalid_calls("m", VOCABULARY, CONTEXT)
        self._statuses = {(request.path, request.body): request.status for request in invalid}

    async def get(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "m", "max_model_len": CONTEXT}]}
        assert path == "/load"
        self._num_loads += 1
        self.is_loaded = True
        load = {"capacity": 100, "free": 40, "cached": 60, "held": 0, "num_running": 0, "num_waiting": 0}
        load |= {
            "num_worker_starts": 1,
            "num_ledger_checks": self._num_steps,
            "num_preemptions": self._num_loads,
        }
        load |= {"prompt_tokens": 200 * self._num_loads, "hit_tokens": 0, "generated_tokens": self._num_steps}
        if self._num_loads > 1:
            load |= FAULTY_LOADS.get(self.fault, {})
        return load

    async def request(
        self, method: str, path: str, body: bytes = b"", max_events: int | None = None
    ) -> Reply:
        await asyncio.sleep(0.001)
        self._num_steps += 1
        if status := self._statuses.get((path, body)):
            return Reply(200 if self.fault == "accepts anything" else status, b"{}", [])
        asked = json.loads(body)
        fault = self.fault if self.is_loaded else ""
        if fault == "fails":
            return Reply(500, b"it failed", [])
        documents = [self._choice(path, asked, idx, fault) for idx in range(asked.get("n", 1))]
        if not asked.get("stream"):
            return Reply(200, json.dumps({"choices": documents}).encode(), [])
        events = [json.dumps({"choices": [document]}).encode() for document in documents]
        events += [] if fault == "ends early" else [b"[DONE]"]
        return Reply(200, b"", events[:max_events])

    def _choice(self, path: str, asked: dict[str, Any], idx: int, fault: str) -> dict[str, Any]:
        text = f"Answer {idx} to {str(asked.get('prompt', asked.get('messages')))[-20:]}"
        if fault == "says something else":
            text = f"{text[:4]}x"
        choice: dict[str, Any] = {"index": idx, "finish_reason": "length"}
        if fault == "stops" and "seed" in asked:
            choice["finish_reason"] = "stop"
        logprob = -0.5 if fault == "is less sure" else -0.25
        if path == CHATS:
            choice["delta" if asked.get("stream") else "message"] = {"content": text}
            if asked.get("logprobs"):
                others = [{"logprob": logprob}, {"logprob": logprob - 2}]
                choice["logprobs"] = {"content": [{"logprob": logprob, "top_logprobs": others}]}
        else:
            choice["text"] = text
            if "logprobs" in asked:
                choice["logprobs"] = {
                    "token_logprobs": [logprob],
                    "top_logprobs": [{"a": logprob, "b": logprob - 2}],
                }
        return choice


FAULTY_LOADS: dict[str, dict[str, Any]] = {
    "holds a token": {"held": 1, "free": 39},
    "has lost a token": {"free": 39},
    "compares no counts": {"num_ledger_checks": 0},
    "has another worker": {"num_worker_starts": 2},
    "preempts nothing": {"num_preemptions": 1},
    "computes little": {"prompt_tokens": 0, "generated_tokens": 0},
}
REASONS = {
    "": None,
    "says something else": "is expected",
    "is less sure": "log-probability of choice 0 differs by 0.25",
    "ends early": "a stream ends in",
    "stops": "a sampled answer of .* ended in {0: 'stop'",
    "fails": "RequestFailed: status 500: it failed",
    "accepts anything": "status 200 where 40",
    "holds a token": "1 tokens are held",
    "has lost a token": "39 free, 60 cached and 0 held tokens do not add up to 100",
    "compares no counts": "still 0 comparisons",
    "has another worker": "the worker was started 2 times",
    "preempts nothing": "no request was preempted",
    "computes little": "only -?[0-9]+ tokens were computed",
}


KINDS = {
    "whole", "streams", "streams that were cut off", "answers that were not waited for", "sampled", "invalid",
}  # fmt: skip


def run(fault: str, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Runs the soak for a second."""
    for name in ("SETTLE_SECONDS", "SAMPLE_SECONDS", "REST_SECONDS"):
        monkeypatch.setattr(soak, name, 0.01)
    options = soak.arguments(["--minutes", "0.016", "--rest-every", "0.006", "--prompts", "9"])
    memory = {"worker": Memory(100 * MIB, 90 * MIB)}
    return asyncio.run(soak.soak(FakeService(fault), options, VOCABULARY, lambda: memory))


@pytest.mark.parametrize("fault", REASONS)
def test_a_service_that_is_wrong_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(fault, monkeypatch)
    reason = REASONS[fault]
    if reason is None:
        assert outcome.failures == []
        assert outcome.num_rests >= 2
        assert set(outcome.counts) == KINDS
    else:
        assert any(re.search(reason, failure) for failure in outcome.failures), outcome.failures


def test_requests_with_a_near_tie_are_not_compared() -> None:
    class Undecided(FakeService):
        def _choice(self, path: str, asked: dict[str, Any], idx: int, fault: str) -> dict[str, Any]:
            choice = super()._choice(path, asked, idx, fault)
            if "logprobs" in choice and path == COMPLETIONS:
                choice["logprobs"]["top_logprobs"] = [{"a": -0.25, "b": -0.2501}]
            return choice

    expected = asyncio.run(soak.expect(Undecided(), "m", 20, random.Random(0)))
    assert len(expected) == 20
    plain = [own.call.path for own in expected if not own.call.is_penalised]
    assert set(plain) == {CHATS}
    with pytest.raises(RequestFailed, match=r"only .* of 4 greedy requests have no near tie"):
        asyncio.run(soak.expect(Undecided(), "m", 1, NoChats()))


class NoChats(random.Random):
    """Draws completions without further fields."""

    def random(self) -> float:
        return 0.0

    def choice(self, seq: Any) -> Any:
        return seq[0]


def samples(*mib: float) -> list[Sample]:
    """Returns samples of a worker with these MiB, and of a router whose memory stays the same."""
    return [
        Sample(5.0 * idx, {"worker": Memory(round(own * MIB), 0), "router": Memory(40 * MIB, 0)})
        for idx, own in enumerate(mib)
    ]


@pytest.mark.parametrize(
    ("mib", "is_flat"),
    [
        ([*range(500, 600), *[600] * 100], True),  # it grew in the first half
        ([1000.0 + 0.1 * idx for idx in range(200)], True),  # by 7.5 MiB in the second half
        ([1000.0 + 0.4 * idx for idx in range(200)], False),  # by 30 MiB of 1,040
        ([40.0 + 0.2 * idx for idx in range(200)], False),  # by 15 MiB, a quarter
        ([600.0, 600.0, 600.0, 900.0] * 50, True),  # peaks that come and go
        ([500.0] * 160 + [620.0] * 40, False),  # a step near the end
    ],
)
def test_memory_is_flat_where_the_last_half_stays_where_it_was(mib: list[float], is_flat: bool) -> None:
    found = soak.growth(samples(*mib))
    assert found["worker"].is_flat is is_flat
    assert found["router"] == Growth(40 * MIB, 40 * MIB)


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, {"prompt": "Hi", "logprobs": 2}), (CHATS, {"messages": [], "logprobs": True})],
    ids=["completion", "chat"],
)
def test_an_answer_is_the_same_whole_and_as_a_stream(path: str, fields: dict[str, Any]) -> None:
    def answer(stream: bool) -> Answer:
        body = json.dumps(fields | {"n": 2, "stream": stream}).encode()
        return read_answer(asyncio.run(FakeService().request("POST", path, body)))

    assert answer(stream=True) == answer(stream=False)
    assert answer(stream=True).margins == [2.0, 2.0]
    assert answer(stream=True).logprobs == {0: [-0.25], 1: [-0.25]}


def test_what_came_before_a_connection_was_closed_is_a_beginning() -> None:
    expected = Answer({0: "abc", 1: "abd"}, {0: "stop", 1: "length"}, {}, [])
    for texts in ({}, {1: ""}, {0: "ab", 1: "abd"}):
        got = Answer(texts, dict.fromkeys(texts), {}, [])
        assert soak.difference(expected, got, is_whole=False) is None
        assert soak.difference(expected, got, is_whole=True) is not None
    for texts in ({0: "b"}, {0: "abcd"}, {2: "a"}):
        assert soak.difference(expected, Answer(texts, {}, {}, []), is_whole=False) is not None


def test_every_invalid_request_has_a_name_of_its_own() -> None:
    calls = invalid_calls("m", VOCABULARY, CONTEXT)
    assert len({call.name for call in calls}) == len({call.body for call in calls}) == len(calls)
    assert all(isinstance(call, Invalid) and 400 <= call.status < 500 for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["", "gemma3", "gpt-oss"])
def test_a_whole_run_on_a_small_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    argv = [
        "--model",
        save_tiny_model(tmp_path / "tiny", family=family),
        "--minutes",
        0.4,
        "--rest-every",
        0.2,
    ]
    argv += ["--prompts", 8, "--max-total-tokens", 512, "--out", out]
    monkeypatch.setattr("sys.argv", ["soak", *map(str, argv)])
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # more wait for one another where the machine is busy
    soak.main()
    results = json.loads(out.read_text())["results"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == results
    assert results["memory_mib"].keys() == {"launcher", "router", "worker", "api"}
    assert results["load"]["num_preemptions"] > 0
    assert sum(results["requests"].values()) > 20
