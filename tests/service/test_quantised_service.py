"""A whole service whose pool holds K/V in 8 bits: it answers, says so, and its counts hold to the end."""

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.config import flag
from tests.support.served import COMPLETIONS, Served, save_tiny_model, wait_until


@pytest.mark.slow
def test_a_service_in_int8_answers_and_counts(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    served = Served(model, tmp_path / "log", "--kv-dtype", "int8", "--kv-skip-layers", "1")
    try:
        served.wait_ready()
        text = served.complete("Once upon a time", 12)
        with ThreadPoolExecutor(8) as crowd:
            texts = list(crowd.map(lambda i: served.complete(f"the number {i} of", 20 + i), range(16)))
        assert all(texts)
        assert served.complete("Once upon a time", 12) == text  # its prompt is cached now
        load = served.at_rest()
        assert (load["kv_dtype"], load["capacity"]) == ("int8", 8192)
        assert load["num_ledger_checks"] > 0
        assert served.request("/v1/models")[1]["data"][0]["kv_dtype"] == "int8"
        # Two layers of two heads, of 8 + 8 dims: one with two scales a head, the other in float32.
        config = 'bytes_per_token="176",cache_dtype="int8"'
        assert config in metrics(served)
        top = [sys.executable, "-m", "lightkv.router.cli", "top", "--once", "--interval", "0.1"]
        frame = subprocess.check_output([*top, "--url", served.url], text=True, timeout=60)
        assert "free of 8,192 tokens, in int8" in " ".join(frame.split())
        status, pool, _ = served.request("/map")
        assert (status, pool["capacity"], pool["num_own"]) == (200, 8192, 0)
        os.kill(served.processes()["worker"], signal.SIGKILL)  # another worker takes its place
        wait_until(lambda: served.request("/load")[1]["num_worker_starts"] == 2, 60.0)
        wait_until(lambda: served.request("/load")[1]["state"] == "ready", 60.0)
        assert served.complete("Once upon a time", 12) == text
        served.at_rest()
        served.process.terminate()
        assert served.wait() == 0, served.log.read_text()
    finally:
        served.close()
    assert "tokens in int8, layer 1 in float32" in served.log.read_text()


def metrics(served: Served) -> str:
    connection = served.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


@pytest.mark.gpu
def test_a_service_on_a_gpu_counts_exactly_and_gives_the_texts_of_an_llm(tmp_path: Path) -> None:
    """200 requests with shared prefixes, 32 at a time; texts are those of `LLM` over the same format."""
    model = save_tiny_model(tmp_path / "tiny", hidden_size=256)
    settings = {"device": "cuda", "dtype": "float32", "kv_dtype": "int8", "max_total_tokens": 16384}
    served = Served(
        model,
        tmp_path / "log",
        "--report-cached-tokens",
        *(word for name, value in settings.items() for word in (flag(name), str(value))),
    )
    rng = random.Random(5)
    documents = [[rng.randrange(1000, 40_000) for _ in range(100 + 150 * i)] for i in range(5)]
    asked = []
    for _ in range(200):
        document = rng.choice(documents)
        tail = [rng.randrange(1000, 40_000) for _ in range(rng.randint(1, 60))]
        asked.append((document[: rng.choice((60, len(document)))] + tail, rng.randint(1, 40)))

    def answer(request: tuple[list[int], int]) -> int:
        """Checks the counts of an answer. Returns how many tokens of its prompt were cached."""
        prompt, max_tokens = request
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, content, _ = served.request(COMPLETIONS, body)
        assert status == 200, content
        usage = content["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), max_tokens)
        assert content["choices"][0]["finish_reason"] == "length"
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    greedy = ["Once upon a time", "The capital of France is", "def main():", "One, two, three, " * 40]
    try:
        served.wait_ready()
        # Until then steps are padded to other sizes, whose sums are rounded in another way.
        wait_until(lambda: served.request("/load")[1]["num_missing_graphs"] == 0, 60)
        texts = [served.complete(prompt, 32) for prompt in greedy]
        generated = 32 * len(greedy)
        wait_until(lambda: served.request("/load")[1]["generated_tokens"] == generated)
        before = served.at_rest()
        with ThreadPoolExecutor(32) as crowd:
            cached = list(crowd.map(answer, asked))
        generated += sum(max_tokens for _, max_tokens in asked)
        wait_until(lambda: served.request("/load")[1]["generated_tokens"] >= generated)
        after = served.at_rest()
        assert after["generated_tokens"] == generated
        counted = {
            "prompt_tokens": sum(len(prompt) for prompt, _ in asked),
            "hit_tokens": sum(cached),
        }
        assert {name: after[name] - before[name] for name in counted} == counted
        assert sum(cached) > counted["prompt_tokens"] // 4
        assert after["num_ledger_checks"] == after["num_steps"] > 0
        assert served.request("/map")[1]["num_own"] == 0
        assert [served.complete(prompt, 32) for prompt in greedy] == texts  # prompts may be cached now
        served.at_rest()
        served.process.terminate()
        assert served.wait() == 0, served.log.read_text()
    finally:
        served.close()
    llm = LLM(EngineConfig(model=str(model), **settings))  # type: ignore[arg-type]
    llm.engine.capture_all()
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    assert [llm.generate(prompt, params)[0].outputs[0].text for prompt in greedy] == texts
    llm.check()


@pytest.mark.slow
def test_a_service_refuses_a_format_that_does_not_fit(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    command = [
        sys.executable,
        "-m",
        "lightkv.router.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    for given, told in (
        (["--kv-dtype", "int9"], "--kv-dtype: 'int9' is no K/V format"),
        (["--kv-dtype", "int8-g3"], "heads of 8 K dims do not fit 3 elements"),
    ):
        found = subprocess.run([*command, *given], capture_output=True, text=True, timeout=120)
        assert found.returncode != 0
        assert told in " ".join(found.stderr.split())
