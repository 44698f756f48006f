"""What operators see of requests, over a fake router: ids, the log, spans, keys, browsers, and their routes."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightkv import __version__
from lightkv.router.api.operators.request_log import RequestRecord
from lightkv.router.api.operators.tracing import SpanTracer, phases
from lightkv.router.api.requests.service import ServiceRoutes
from lightkv.router.config import EngineConfig, InvalidConfig, ServiceConfig
from lightkv.router.model_files import resolve
from lightkv.router.service import launch
from lightkv.router.service.access.key_file import ApiKeys, name_of_key, read_keys
from lightkv.router.service.messages import CacheReset
from lightkv.router.text.tokenizer import ChatTemplateError, Tokenizer
from tests.support.fake_router import (
    CAPACITY,
    CHAT,
    COMPLETIONS,
    HELLO,
    MODEL,
    ApiUnderTest,
    error_of,
    ids_of,
    service,
    wait_until,
)

ORIGIN = "https://pages.example"
KEY = {"Authorization": "Bearer k"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    settings: dict[str, Any] = {
        "api_key": ("k",),
        "log_requests": True,
        "allowed_origins": (ORIGIN,),
        "default_max_tokens": 3,
        "configuration": {"port": 8000},
    }
    with service(tmp_path_factory.mktemp("api"), **settings).running() as under_test:
        yield under_test


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# Ids


@pytest.mark.parametrize("given", ["abc", "A-1_2.3~4:5/6+7=8@9", "x" * 128])
def test_a_clients_id_is_kept(api: ApiUnderTest, given: str) -> None:
    headers = api.send("GET", "/health", headers={"X-Request-Id": given})[1]
    assert headers.get_all("X-Request-Id") == [given]


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", 'a"b', "ä"])
def test_other_ids_are_replaced(api: ApiUnderTest, given: str | None) -> None:
    sent = {} if given is None else {"X-Request-Id": given}
    first, second = (api.send("GET", "/health", headers=sent)[1]["X-Request-Id"] for _ in range(2))
    assert len(first) == 32
    assert first != given
    assert first != second


def test_errors_and_streams_have_an_id(api: ApiUnderTest) -> None:
    headers = {"X-Request-Id": "mine"}
    assert api.send("POST", CHAT, HELLO, headers)[1]["X-Request-Id"] == "mine"  # 401
    found = api.send("POST", CHAT, HELLO | {"stream": True}, headers | KEY)
    assert (found[0], found[1]["X-Request-Id"]) == (200, "mine")


# The log


def test_a_line_of_the_log_has_counts_and_times_and_no_text(
    api: ApiUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    api.router.num_cached = 2
    secret = {"prompt": "my secret text", "max_tokens": 5, "n": 2, "model": MODEL}
    assert api.send("POST", COMPLETIONS, secret, KEY | {"X-Request-Id": "logged"})[0] == 200
    assert api.send("GET", "/v1/models/secret", headers=KEY)[0] == 404
    assert api.send("GET", "/secret", headers=KEY)[0] == 404
    assert api.send("POST", COMPLETIONS, secret)[0] == 401
    text = ""

    def own_lines() -> list[dict[str, Any]]:
        return list(dropwhile(lambda line: line["id"] != "logged", lines_of(text)))

    def has_all() -> (
        bool
    ):  # the last line may come after the answer, and that of the test before after its end
        nonlocal text
        text += capfd.readouterr().err
        return len(own_lines()) == 4

    wait_until(has_all)
    assert "secret" not in text
    first, *others = own_lines()
    assert first["id"] == "logged"
    assert (first["method"], first["route"], first["status"]) == ("POST", COMPLETIONS, 200)
    (submit, _) = api.router.submits
    assert first["prompt_tokens"] == len(ids_of(submit))
    assert (first["cached_tokens"], first["completion_tokens"]) == (2, 10)
    assert first["finish_reasons"] == ["length", "length"]
    assert 0 < first["first_token_seconds"] <= first["seconds"] < 60
    assert first["key"] == name_of_key("k")
    assert first["ignored_fields"] == []
    assert [(line["route"], line["status"], line["key"]) for line in others] == [
        ("/v1/models/{model:path}", 404, name_of_key("k")),
        (None, 404, name_of_key("k")),
        (None, 401, None),
    ]


def test_probes_and_metrics_are_not_logged(api: ApiUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert api.send("GET", path, headers=KEY | {"X-Request-Id": path[1:]})[0] == 200
    text = ""

    def has_line() -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return bool(lines_of(text))

    wait_until(has_line)
    assert [line["id"] for line in lines_of(text)] == ["version"]


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"store": True, "metadata": {"a": "b"}}, ["store"]),
        (CHAT, {"verbosity": "low", "service_tier": "flex", "store": None}, ["verbosity", "service_tier"]),
        (CHAT, {"max_tokens": -1}, ["max_tokens"]),
        (CHAT, {"reasoning_effort": "high"}, ["reasoning_effort"]),
        (COMPLETIONS, {"reasoning_effort": "high", "max_tokens": 2}, ["reasoning_effort"]),
        ("/v1/responses", {"store": True, "text": {"verbosity": "high"}}, ["store", "verbosity"]),
    ],
)
def test_the_line_names_the_fields_that_had_no_effect(
    api: ApiUnderTest,
    capfd: pytest.CaptureFixture[str],
    path: str,
    fields: dict[str, Any],
    ignored: list[str],
) -> None:
    prompt = {CHAT: HELLO, COMPLETIONS: {"prompt": "a"}}.get(path, {"input": "a"})
    assert api.send("POST", path, prompt | fields, KEY)[0] == 200
    text = ""

    def has_line() -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return bool(lines_of(text))

    wait_until(has_line)
    (line,) = lines_of(text)
    assert sorted(line["ignored_fields"]) == sorted(ignored)


# Limits and forms


def test_the_default_of_max_tokens_is_cut_to_the_context(api: ApiUnderTest) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HELLO)):
        for more in ({}, {"max_tokens": 5}):
            api.send("POST", path, body | more, KEY)
    long = {"prompt": [5] * 1022}
    assert api.send("POST", COMPLETIONS, long, KEY)[0] == 200
    assert [submit.params.max_tokens for submit in api.router.submits] == [3, 5, 3, 5, 2]


@pytest.mark.parametrize(
    ("kind", "said"),
    [("text/plain", "the Content-Type is 'text/plain'"), ("application/x-www-form-urlencoded", "x-www-form")],
)
def test_a_body_of_another_type_is_named(api: ApiUnderTest, kind: str, said: str) -> None:
    status, _, content = api.send("POST", CHAT, HELLO, KEY | {"Content-Type": kind})
    assert status == 400
    assert said in error_of(content)["message"]
    assert "application/json" in error_of(content)["message"]


def test_a_template_of_ones_own_replaces_the_models() -> None:
    directory = resolve(EngineConfig.model, report=lambda line: None)
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    assert Tokenizer(directory, template).render_chat(HELLO["messages"]) == "<Hello!>"
    with pytest.raises(ChatTemplateError, match="does not parse"):
        Tokenizer(directory, "{% for %}")


# Browsers


def test_pages_of_an_allowed_origin_may_call_the_service(api: ApiUnderTest) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-any"}
    status, headers, _ = api.send("OPTIONS", CHAT, headers={"Origin": ORIGIN} | asks)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
    assert headers["Access-Control-Allow-Headers"] == "authorization,x-any"
    for sent in (KEY, {}):  # a page may read the 401, too
        headers = api.send("POST", CHAT, HELLO, sent | {"Origin": ORIGIN})[1]
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
    assert headers["Access-Control-Expose-Headers"] == "X-Request-Id, request-id, Retry-After"


def test_a_request_on_which_the_service_fails_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: ServiceRoutes) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(ServiceRoutes, "version", fail)
    with service(tmp_path).running() as failing:
        status, headers, content = failing.send("GET", "/version")
        assert status == 500
        assert headers["X-Request-Id"]
        assert error_of(content)["message"].startswith("the service failed")


def test_pages_of_other_origins_may_not(api: ApiUnderTest, tmp_path: Path) -> None:
    other = {"Origin": "https://other.example"}
    status, headers, _ = api.send("OPTIONS", CHAT, headers=other | {"Access-Control-Request-Method": "POST"})
    assert (status, headers["Access-Control-Allow-Origin"]) == (400, None)
    assert api.send("POST", CHAT, HELLO, KEY | other)[1]["Access-Control-Allow-Origin"] is None
    with service(tmp_path).running() as closed:
        status, headers, _ = closed.send(
            "OPTIONS", CHAT, headers={"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        )
        assert (status, headers["Access-Control-Allow-Origin"]) == (405, None)


# Keys


def test_the_keys_of_a_file_have_names_and_are_read_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, now = tmp_path / "keys", 0.0
    file.write_text("# ours\nalice key-a\nkey-b\n\n")
    keys = ApiKeys(["given"], str(file), lambda: now)
    assert keys.any
    assert keys.find(b"key-a") == b"key-a"
    assert [keys.name(key) for key in (b"key-a", b"key-b", b"given", b"none")] == [
        "alice",
        name_of_key("key-b"),
        name_of_key("given"),
        None,
    ]
    assert keys.find(b"alice") is None
    file.write_text("bob key-c\n")
    assert keys.find(b"key-c") is None  # it was looked at within the last second
    now = 1.5
    assert keys.find(b"key-c") == b"key-c"
    assert (keys.find(b"key-a"), keys.find(b"given")) == (None, b"given")
    file.write_text("one two three\n")
    now = 3.0
    assert keys.find(b"key-c") == b"key-c"
    assert "stay as they were" in capfd.readouterr().err
    file.unlink()
    now = 4.5
    assert keys.find(b"key-c") == b"key-c"
    now = 6.0
    keys.find(b"key-c")
    assert capfd.readouterr().err.count("stay as they were") == 1  # once for each change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b c", "3 words in line 1"),
        ("k\nname k", "line 2"),
        ("# only\n", "holds no key"),
        ("k\nn k2 rpm=0", "rpm .* in line 2; write rpm=100"),
        ("k rpm=1 rpm=2", "rpm twice"),
        ("n k tpm=x", "tpm"),
        ("n k rps=1", "3 words in line 1"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidConfig, match=message) as raised:
        read_keys(tmp_path / "keys")
    assert "k\n" not in str(raised.value)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="UTF-8"):
        read_keys(tmp_path / "bytes")


def test_a_pipe_or_a_device_as_the_file_of_keys_is_refused_unread(tmp_path: Path) -> None:
    """To read the pipe, to which nothing writes, would take for ever, and so would the first device."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(InvalidConfig, match=f"the file of keys {path} is not a regular file"):
            launch.check_keys(ServiceConfig(api_key_file=str(path)))
    with pytest.raises(launch.CannotServe, match="directory"):
        launch.check_keys(ServiceConfig(api_key_file=str(tmp_path)))


def test_a_pipe_in_the_place_of_a_running_services_keys_changes_nothing(tmp_path: Path) -> None:
    file, now = tmp_path / "keys", 0.0
    file.write_text("old\n")
    keys = ApiKeys([], str(file), lambda: now)
    file.unlink()
    os.mkfifo(file)
    now = 2.0
    assert keys.find(b"old") == b"old"


def test_a_running_service_takes_new_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    with service(tmp_path, api_key_file=str(file)).running() as api:

        def status(key: str) -> int:
            return api.send("GET", "/version", headers={"Authorization": f"Bearer {key}"})[0]

        assert (status("old"), status("new")) == (200, 401)
        file.write_text("team new\n")
        wait_until(lambda: status("new") == 200)
        assert status("old") == 401


# Routes


def test_the_cache_is_reset(api: ApiUnderTest) -> None:
    status, _, content = api.send("POST", "/reset_prefix_cache", headers=KEY)
    assert (status, json.loads(content)) == (200, {"num_evicted_tokens": 500})
    api.router.cache_reset = CacheReset(None, "starting another worker")
    status, _, content = api.send("POST", "/reset_prefix_cache", headers=KEY)
    assert status == 503
    assert "another worker" in error_of(content)["message"]
    assert api.send("POST", "/reset_prefix_cache")[0] == 401


def test_the_service_describes_itself(api: ApiUnderTest) -> None:
    info = json.loads(api.send("GET", "/server_info", headers=KEY)[2])
    assert (info["version"], info["configuration"]) == (__version__, {"port": 8000})
    assert info["runner"]["capacity"] == CAPACITY
    assert info["runner"]["limits"]["max_model_len"] == 1024


def test_the_docs_are_a_page_over_the_document(api: ApiUnderTest) -> None:
    status, headers, content = api.send("GET", "/docs", headers=KEY)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "url: '/openapi.json'" in content.decode()
    assert api.send("GET", "/docs")[0] == 401


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/v1/embeddings", "Text Embeddings Inference"),
        ("POST", "/api/embed", "Text Embeddings Inference"),
        ("POST", "/v1/rerank", "reranker"),
        ("POST", "/v1/moderations", "moderates none"),
        ("POST", "/v1/audio/transcriptions", "text only"),
        ("POST", "/v1/images/generations", "text only"),
        ("POST", "/v1/files", "keeps no files"),
        ("GET", "/v1/files/file-1/content", "keeps no files"),
        ("GET", "/v1/responses/resp_1", "keeps no files, conversations"),
        ("POST", "/v1/batches", "/v1/chat/completions"),
        ("POST", "/v1/assistants", "/v1/chat/completions"),
        ("POST", "/v1/fine_tuning/jobs", "neither trains"),
        ("POST", "/api/chat", "/v1/chat/completions"),
        ("POST", "/api/generate", "/v1/completions"),
        ("GET", "/api/tags", "/v1/models"),
        ("POST", "/generate", "/v1/completions"),
        ("POST", "/v1/embeddingsx", "/docs"),
        ("GET", "/" + "x" * 1000, "/docs"),
    ],
)
def test_a_path_of_another_api_is_answered_with_what_to_use(
    api: ApiUnderTest, method: str, path: str, instead: str
) -> None:
    status, _, content = api.send(method, path, {"input": "a", "model": MODEL}, KEY)
    assert status == 404
    message = error_of(content)["message"]
    assert message.startswith(f"{path[:100]} does not exist here")
    assert instead in message
    assert len(message) < 400


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_a_part_that_is_no_text_is_answered_with_text_only(api: ApiUnderTest, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:,"}}
    content: Any = [{"type": "text", "text": "What is this?"}, part]
    status, _, answered = api.send("POST", CHAT, {"messages": [{"role": "user", "content": content}]}, KEY)
    error = error_of(answered)
    assert (status, error["param"]) == (400, "messages")
    assert f"a part of type {kind}" in error["message"]
    assert "text only" in error["message"]
    asked = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}
    assert "text only" in error_of(api.send("POST", "/v1/responses", asked, KEY)[2])["message"]


# Spans


def test_spans_beyond_the_queue_are_dropped() -> None:
    """While the collector does not answer, a span takes no memory that another one would not."""

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            is_free.wait(20)
            return super().export(spans)

    is_free, exporter = threading.Event(), Stuck()
    processor = BatchSpanProcessor(exporter, max_queue_size=64, max_export_batch_size=8)
    with closing(SpanTracer(processor, MODEL)) as tracer:
        for i in range(1000):
            tracer.record(RequestRecord(str(i), "GET", 1.0, 2.0, None, 200, None, None))
        is_free.set()
    assert 64 <= len(exporter.get_finished_spans()) <= 64 + 2 * 8


def test_a_request_becomes_spans_below_its_callers(api: ApiUnderTest) -> None:
    exporter = InMemorySpanExporter()
    clock = type("Clock", (), {"begun": 10.0, "first": 12.0, "ended": 15.0, "waited": 0.5})
    completion = type("Completion", (), {"finish_reason": "stop"})
    answer: Any = type("Answer", (), {"clock": clock, "index": 0, "completion": completion})
    generation: Any = type(
        "Generation",
        (),
        {"answers": [answer], "num_prompt_tokens": 7, "num_completion_tokens": 4, "num_hit_tokens": 2},
    )
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    record = RequestRecord("mine", "POST", 9.5, 15.5, CHAT, 200, None, f"00-{trace}-{caller}-01", generation)
    with closing(SpanTracer(SimpleSpanProcessor(exporter), MODEL)) as tracer:
        tracer.record(record)
        tracer.record(RequestRecord("other", "GET", 1.0, 2.0, None, 500, None, "nonsense"))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"queue", "prefill", "decode", f"POST {CHAT}", "GET unknown"}
    request = spans[f"POST {CHAT}"]
    assert f"{request.context.trace_id:032x}" == trace
    assert f"{request.parent.span_id:016x}" == caller
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    for name, wanted in (("queue", 0.5), ("prefill", 1.5), ("decode", 3.0), (f"POST {CHAT}", 6.0)):
        assert seconds[name] == pytest.approx(wanted, abs=1e-3)
    assert all(
        spans[name].parent.span_id == request.context.span_id for name in ("queue", "prefill", "decode")
    )
    assert request.attributes["gen_ai.usage.input_tokens"] == 7
    assert request.attributes["lightkv.request_id"] == "mine"
    assert (spans["GET unknown"].parent, spans["GET unknown"].status.is_ok) == (None, False)
    clock.first = None
    assert phases(answer, 15.5) == [("queue", 10.0, 15.0)]


def test_a_service_gives_its_records_to_the_tracer(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    tracer = SpanTracer(SimpleSpanProcessor(exporter), MODEL)
    with service(tmp_path).running(take=[tracer.record]) as api, closing(tracer):
        api.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
        wait_until(lambda: len(exporter.get_finished_spans()) == 4)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["queue", "prefill", "decode", f"POST {COMPLETIONS}"]
    now = time.time_ns()
    assert all(now - 60e9 < span.start_time <= span.end_time <= now for span in exporter.get_finished_spans())


def test_a_path_of_a_proxy_is_taken_away_wherever_it_stands(tmp_path: Path) -> None:
    with service(tmp_path, api_key=("k",), metrics_key=("m",), root_path="/llm").running() as api:
        for prefix in ("", "/llm"):
            assert api.send("GET", f"{prefix}/health")[0] == 200
            assert api.send("GET", f"{prefix}/v1/models")[0] == 401
            assert api.send("GET", f"{prefix}/v1/models", headers=KEY)[0] == 200
            assert api.send("GET", f"{prefix}/metrics", headers={"Authorization": "Bearer m"})[0] == 200
            status, _, content = api.send("POST", f"{prefix}/v1/messages", {}, KEY)
            assert (status, json.loads(content)["type"]) == (400, "error")
        for path in ("/llmhealth", "/llm/llm/health", "/other/health"):
            assert api.send("GET", path)[0] == 401
            assert api.send("GET", path, headers=KEY)[0] == 404
        document = json.loads(api.send("GET", "/openapi.json", headers=KEY)[2])
        assert document["servers"] == [{"url": "/llm"}]
