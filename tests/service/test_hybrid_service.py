"""A whole service with a model whose layers keep states, and a chat template as Qwen3.5's: it does what it does
with a plain model, its tokens are transformers' own, and its counts are exact."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lightkv.router.cli.app import app
from tests.support.hybrid_models import greedy, save_hybrid
from tests.support.served import COMPLETIONS, Served

# tests/engine/ runs such models in process, and the other tests of this folder plain ones as services.
pytestmark = pytest.mark.slow
CHATS = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Why is it dark?"}], "temperature": 0, "max_tokens": 8}
SHORT = ASKED | {"chat_template_kwargs": {"enable_thinking": False}}
PLACE = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PLACE}}]
FORM = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": [17, "dusk"]}}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with ten states for up to 16 requests, which computes prompts in chunks of 32 tokens."""
    log, sizes = tmp_path_factory.mktemp("hybrid") / "log", ("--max-num-seqs", "16", "--prefill-chunk", "32")
    served = Served(saved, log, *sizes, "--mamba-full-memory-ratio", "0.08", "--report-cached-tokens")
    try:
        yield served.wait_ready()
        served.process.terminate()
        assert served.wait() == 0, log.read_text()
    finally:
        served.close()


def answer(served: Served, path: str = CHATS, **fields: Any) -> dict[str, Any]:
    status, content, _ = served.request(path, fields)
    assert status == 200, content
    return content


def complete(served: Served, own: Any, prompt: list[int], **fields: Any) -> tuple[int, list[int]]:
    """Returns how many tokens of the prompt were cached, and the last answer. All are transformers' own."""
    fields |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = answer(served, COMPLETIONS, prompt=prompt, **fields)
    for choice in found["choices"]:
        assert choice["token_ids"] == greedy(own, prompt, choice["token_ids"])
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], choice["token_ids"]


def test_chats_think_call_tools_and_keep_to_a_schema(served: Served) -> None:
    thought = answer(served, **ASKED)["choices"][0]["message"]
    assert thought["content"] is None
    with served.events(CHATS, ASKED) as events:
        deltas = [one["choices"][0]["delta"] for one in events if one != "[DONE]"]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == thought["reasoning_content"]
    said = answer(served, **SHORT, logprobs=True)["choices"][0]
    text = said["message"]["content"]
    assert "reasoning_content" not in said["message"]
    assert len(said["logprobs"]["content"]) == 8
    stopped = answer(served, **SHORT, stop=text[3])["choices"][0]
    assert (stopped["finish_reason"], stopped["message"]["content"]) == ("stop", text.partition(text[3])[0])
    kept = answer(served, **SHORT, response_format=FORM)["choices"][0]["message"]["content"]
    assert json.loads(kept) in (17, "dusk")
    called = answer(served, **(SHORT | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 99}))
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["at"] in ("sea", "sky")


def test_a_crowd_and_sessions_share_few_states(served: Served, saved: Path) -> None:
    """Prompts of one token and of many chunks, eight answers at once, and clients that leave while a prompt is
    computed; then three chats that begin alike."""
    own, rng = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval(), random.Random(1)
    shared = [rng.randrange(256) for _ in range(200)]

    def ask(number: int) -> None:
        prompt = [*shared[: 50 * (number % 5)], number]
        if number % 4 == 3:
            with served.events(COMPLETIONS, {"prompt": prompt * 20, "max_tokens": 50}):
                return
        complete(served, own, prompt, n=(1, 8, 2)[number % 4], max_tokens=1 + number % 7)

    with ThreadPoolExecutor(12) as crowd:
        list(crowd.map(ask, range(24)))
    chats = [[rng.randrange(256) for _ in range(100)]] * 3
    for turn, number in [(turn, number) for turn in range(3) for number in range(3)]:
        least = len(chats[number]) - 1 if turn else 100 * (number == 2)  # kept at the second use
        chats[number] = [*chats[number], *(rng.randrange(256) for _ in range(20))]
        cached, said = complete(served, own, chats[number], session_id=str(number), max_tokens=4)
        assert cached >= least
        chats[number] += said
    load = served.at_rest()
    assert load["free_states"] + load["cached_states"] == load["num_states"] == 10
    assert load["num_worker_starts"] == 1


def test_operators_see_the_states(served: Served, saved: Path) -> None:
    assert served.request("/server_info")[1]["runner"]["num_states"] == 10
    assert served.request("/map")[1]["states"]["num_own"] == 0
    found = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", "--url", served.url])
    assert "of 10 states" in " ".join(found.output.split())
    options = ["--model", str(saved), "--device", "cpu", "--max-tokens", "5", "--temperature", "0", "--raw"]
    found = CliRunner().invoke(app, ["generate", *options, "Once"])
    assert served.complete("Once", 5) in found.stdout
