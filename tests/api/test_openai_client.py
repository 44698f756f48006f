"""OpenAI's client against the real service: the calls that programs make, and the exceptions that they
expect."""

import asyncio
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.served import API_KEY, Served, SharedService, save_tiny_model, wait_until

MODEL = "tiny"
NUM_RUNNING, NUM_QUEUED = 4, 4
HELLO: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the sun?"},
]
ALL: dict[str, Any] = {"ignore_eos": True}  # a random model may end anywhere


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedService]:
    model = save_tiny_model(tmp_path_factory.mktemp("openai") / "tiny")

    def begin() -> Served:
        directory = tmp_path_factory.mktemp("service")
        (directory / "s").mkdir()
        bounds = ["--max-num-seqs", str(NUM_RUNNING), "--max-queued-requests", str(NUM_QUEUED)]
        names = ["--served-model-name", MODEL, "--report-cached-tokens"]
        env = {"TMPDIR": str(directory / "s")}
        return Served(model, directory / "log", *bounds, *names, api_key=API_KEY, env=env)

    with closing(SharedService(begin)) as service:
        yield service


@pytest.fixture
def served(service: SharedService) -> Served:
    return service.running()


def connect(served: Served, **options: Any) -> openai.OpenAI:
    """Returns a client that does not retry."""
    fixed: dict[str, Any] = {"api_key": API_KEY, "max_retries": 0, "timeout": 60.0}
    return openai.OpenAI(base_url=f"{served.url}/v1", **(fixed | options))


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with connect(served) as client:
        yield client


def greedy(client: openai.OpenAI, max_tokens: int = 12, **options: Any) -> Any:
    return client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=max_tokens,
        temperature=0,
        extra_body=ALL,
        **options,
    )


# --------------------------------------------------------------------------------
# Answers


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.object, model.owned_by) == ("model", "lightkv")


def test_a_completion_and_its_usage(client: openai.OpenAI) -> None:
    done = greedy(client)
    (choice,) = done.choices
    assert (done.object, done.model) == ("text_completion", MODEL)
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert choice.text
    assert done.usage.completion_tokens == 12
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12
    assert greedy(client).usage.prompt_tokens_details.cached_tokens == done.usage.prompt_tokens - 1


def test_a_streamed_completion_has_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    whole = greedy(client)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_one_or_several_prompts_as_texts_or_ids(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "temperature": 0, "extra_body": ALL}
    one = client.completions.create(prompt="Hi", **options).choices[0].text
    several = client.completions.create(prompt=["Hi", "Hi"], **options)
    assert [(choice.index, choice.text) for choice in several.choices] == [(0, one), (1, one)]
    ids = client.completions.create(prompt=[9707, 11, 28], **options)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    pairs = client.completions.create(prompt=[[1, 2], [3, 4]], echo=True, **options)
    assert len(pairs.choices) == 2


def test_a_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=8, extra_body=ALL
    )
    (choice,) = done.choices
    assert (done.object, choice.message.role, choice.finish_reason) == (
        "chat.completion",
        "assistant",
        "length",
    )
    assert choice.message.content
    assert done.usage is not None
    assert done.usage.completion_tokens == 8


def test_a_streamed_chat_has_the_same_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options, extra_body=ALL).choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True, extra_body=ALL))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"
    assert whole is not None
    stop = whole[6:9]
    with client.chat.completions.stream(**options, stop=stop, extra_body=ALL) as stream:
        choice = stream.get_final_completion().choices[0]  # assembled by the client
    assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_n_answers(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "n": 3, "seed": 1}
    done = client.chat.completions.create(**options, extra_body=ALL)
    texts = [choice.message.content for choice in done.choices]
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True, extra_body=ALL):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_session_until_it_is_released(served: Served, client: openai.OpenAI) -> None:
    def sessions() -> tuple[int, int]:
        load = served.request("/load")[1]
        return load["num_sessions"], load["session_tokens"]

    found = client.completions.create(
        model=MODEL,
        prompt=[7] * 30,
        max_tokens=5,
        extra_body=ALL | {"session_id": "chat 1", "session_ttl": 500},
    )
    wait_until(lambda: sessions() == (1, 34))  # the last token has no slot
    assert found.usage is not None
    longer = client.completions.create(
        model=MODEL, prompt=[7] * 30 + [8] * 4, max_tokens=3, extra_headers={"X-Session-Id": "chat 1"}
    )
    assert longer.usage is not None
    assert longer.usage.prompt_tokens_details is not None
    assert longer.usage.prompt_tokens_details.cached_tokens == 30
    release = "/v1/sessions/chat%201/release"
    assert served.request(release, {})[:2] == (200, {"id": "chat 1", "object": "session", "released": True})
    wait_until(lambda: sessions() == (0, 0))
    assert served.request(release, {})[0] == 404


def test_a_stop_string(client: openai.OpenAI) -> None:
    text = greedy(client).choices[0].text
    stop = text[6:9]
    (choice,) = greedy(client, stop=[stop, "never this"]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_a_seed_makes_an_answer_repeatable(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        done = client.completions.create(model=MODEL, prompt="A", max_tokens=12, seed=seed, extra_body=ALL)
        return done.choices[0].text

    assert sampled(7) == sampled(7) != sampled(8)


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    (choice,) = greedy(client, max_tokens=6, logprobs=3).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 6
    assert found.token_logprobs == [max(top.values()) for top in found.top_logprobs]
    assert all(sum(map(math.exp, top.values())) < 1.0001 for top in found.top_logprobs)


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=ALL,
    )
    (choice,) = done.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token
        assert token.logprob <= 0


async def test_the_asynchronous_client(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> int:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=5 + i, stream=True, extra_body=ALL
        )
        return len([chunk async for chunk in stream if chunk.choices[0].delta.content])

    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=API_KEY, max_retries=0) as client:
        assert all(await asyncio.gather(*(ask(client, i) for i in range(NUM_RUNNING))))


# --------------------------------------------------------------------------------
# Errors


def error_of(error: openai.APIStatusError) -> tuple[Any, Any, Any]:
    """Returns the fields of OpenAI's error object, as the client reads them."""
    return error.status_code, error.type, error.param


@pytest.mark.parametrize(
    ("options", "kind", "fields"),
    [
        ({"max_tokens": 0}, openai.BadRequestError, (400, "invalid_request_error", "max_tokens")),
        ({"temperature": -1}, openai.BadRequestError, (400, "invalid_request_error", "temperature")),
        ({"n": 1000}, openai.BadRequestError, (400, "invalid_request_error", "n")),
        ({"messages": []}, openai.BadRequestError, (400, "invalid_request_error", "messages")),
        ({"max_tokens": 8192}, openai.BadRequestError, (400, "invalid_request_error", None)),  # never fits
        ({"model": "gpt-5"}, openai.NotFoundError, (404, "not_found_error", "model")),
    ],
    ids=["max_tokens", "temperature", "n", "messages", "never-fits", "model"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_refusals_raise_the_clients_exceptions(
    client: openai.OpenAI,
    options: dict[str, Any],
    kind: type[openai.APIStatusError],
    fields: Any,
    stream: bool,
) -> None:
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**({"model": MODEL, "messages": HELLO, "stream": stream} | options))
    assert error_of(raised.value) == fields


def test_a_request_that_never_fits_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"5 prompt tokens and up to 8188 new ones .* 8192 tokens"
    ):
        client.completions.create(model=MODEL, prompt=[1, 2, 3, 4, 5], max_tokens=8188)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="give one of tiny"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("key", ["wrong", f"{API_KEY}x"])
def test_a_wrong_key(served: Served, key: str) -> None:
    with connect(served, api_key=key) as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            client.models.list()
        assert error_of(raised.value) == (401, "authentication_error", None)
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)


def test_a_full_queue_is_a_rate_limit_and_the_client_retries(served: Served, client: openai.OpenAI) -> None:
    def begin(streams: ExitStack) -> None:
        stream = client.completions.create(
            model=MODEL, prompt="A", max_tokens=1000, stream=True, extra_body=ALL
        )
        streams.callback(stream.close)

    with ExitStack() as streams:
        for _ in range(NUM_RUNNING):
            begin(streams)
        wait_until(lambda: served.request("/load")[1]["num_running"] == NUM_RUNNING)
        for _ in range(NUM_QUEUED):
            begin(streams)
        with pytest.raises(openai.RateLimitError) as raised:
            greedy(client)
        assert error_of(raised.value) == (429, "rate_limit_error", None)
        assert raised.value.response.headers["retry-after"] == "1"
        release = threading.Timer(0.5, streams.pop_all().close)
        release.start()
        with connect(served, max_retries=10) as patient:  # clients retry by default
            assert greedy(patient).choices[0].text
        release.join()
    served.at_rest()


@pytest.mark.slow  # test_launch.py kills a worker under a stream, too
def test_a_stream_that_breaks_off_is_an_error_with_its_code(served: Served, client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="A", max_tokens=7000, stream=True, extra_body=ALL)
    assert next(stream).choices
    os.kill(served.processes()["worker"], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the answer was lost") as raised:
        list(stream)
    assert (raised.value.type, str(raised.value.code)) == ("service_unavailable_error", "503")
    with pytest.raises(openai.InternalServerError) as refused:  # another worker is starting
        greedy(client)
    assert error_of(refused.value) == (503, "service_unavailable_error", None)
    assert int(refused.value.response.headers["retry-after"]) > 0
    wait_until(lambda: served.request("/ready")[0] == 200)


def test_a_service_whose_router_is_killed_ends_its_streams_and_itself(
    served: Served, client: openai.OpenAI
) -> None:
    """`test_launch_end.py` kills the API process in the same way."""
    stream = client.completions.create(model=MODEL, prompt="A", max_tokens=7000, stream=True, extra_body=ALL)
    assert next(stream).choices
    os.kill(served.processes()["router_process"], signal.SIGKILL)
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert str(raised.value.code) == "503"
    assert served.wait() == 1
    assert "was ended by SIGKILL" in served.log.read_text().splitlines()[-1]
    assert list((served.log.parent / "s").iterdir()) == []
