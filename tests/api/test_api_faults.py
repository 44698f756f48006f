"""The HTTP application when something goes wrong: refusals, lost answers, slow clients and clients that
disconnect, keys, limits."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightkv.router.api.requests.chat import ChatRequest
from lightkv.router.api.requests.completion import CompletionRequest
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.service.messages import Refused
from tests.support.fake_router import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LIMITS,
    MODEL,
    TEXT,
    ApiUnderTest,
    default_tokenizer,
    error_of,
    metrics_text,
    service,
    stream_texts,
    wait_until,
)

# Errors


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 10**30}, "max_tokens"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"temperature": float("nan")}, "temperature"),
        (COMPLETIONS, {"temperature": float("inf")}, "temperature"),
        (COMPLETIONS, {"top_p": 1.5}, "top_p"),
        (COMPLETIONS, {"n": 129}, "n"),
        (COMPLETIONS, {"n": 0}, "n"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": -1}, "n"),
        (COMPLETIONS, {"n": 17}, "prompt"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"stop": ""}, "stop"),
        (COMPLETIONS, {"cache_salt": "x" * 1025}, "cache_salt"),
        (COMPLETIONS, {"stop_token_ids": [1.5]}, "stop_token_ids"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"²": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"1": "x"}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {str(i): 0 for i in range(513)}}, "logit_bias"),
        (COMPLETIONS, {"seed": 2**64}, "seed"),
        (COMPLETIONS, {"priority": 2**31}, "priority"),
        (COMPLETIONS, {"stream": "yes"}, "stream"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 0}, "best_of"),
        (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True, "n": 2}, "echo"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5] * 30_000}, "prompt"),
        (COMPLETIONS, {"prompt": [["a"]]}, "prompt"),
        (COMPLETIONS, {"prompt": {}}, "prompt"),
        (COMPLETIONS, {"prompt": [2**31]}, None),
        (COMPLETIONS, {"prompt": "word " * 1100}, None),
        (COMPLETIONS, {"max_tokens": LIMITS.max_model_len}, None),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"tools": [{}]}, "tools"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 6000}] * 4}, None),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_a_value_out_of_bounds_is_refused_by_name(
    api: ApiUnderTest, path: str, fields: dict[str, Any], param: str | None
) -> None:
    status, _, content = api.send("POST", path, {**HELLO, "prompt": "a", **fields})
    assert status == 400, content
    error = error_of(content)
    is_id = fields.get("prompt") == [2**31]
    code = 400 if param or is_id else "context_length_exceeded"
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", code)
    assert not api.router.submits
    assert len(content) < 1000


def test_a_request_that_never_fits_is_refused_with_the_numbers(api: ApiUnderTest) -> None:
    error = api.post(COMPLETIONS, {"prompt": [5] * 1000, "max_tokens": 100}, 400)["error"]
    for number in ("1000 prompt tokens", "100 new ones", "1024 tokens"):
        assert number in error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, {"n": 5}), (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2}), (CHAT, {"n": 5})],
    ids=["n", "prompts", "chat"],
)
def test_more_answers_than_the_queue_holds_are_refused_with_the_numbers(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    narrow = ApiSettings(served_model_name=(MODEL,), max_queued_requests=4)
    with ApiUnderTest(default_tokenizer(), tmp_path / "router", narrow).running() as api:
        error = api.post(path, {**HELLO, "prompt": "a", **fields}, 400)["error"]
        assert error["param"] == "n"
        for words in (f"{fields['n']} for each of", "at most 4", "--max-queued-requests"):
            assert words in error["message"]
        assert not api.router.submits
        assert len(api.post(path, {**HELLO, "prompt": "a", "n": 4, "max_tokens": 1})["choices"]) == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.characters(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "tokens", "role", "content"})
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text() | JSON}), max_size=3)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), messages=MESSAGES | JSON)
def test_no_body_causes_a_server_error(api: ApiUnderTest, path: str, fields: Any, messages: Any) -> None:
    api.router.refuse = lambda submit: Refused(submit.request_id, "queue_full", "enough")
    sound = {"prompt": "a"} if path in (COMPLETIONS, "/tokenize") else {"messages": messages, "tokens": [1]}
    status, _, content = api.send("POST", path, sound | fields)
    assert status in (200, 400, 404, 429), content
    if status != 200:
        error_of(content)


def test_half_a_surrogate_pair_is_replaced_in_every_text(api: ApiUnderTest) -> None:
    asked = {"prompt": "a\ud800b", "echo": True, "max_tokens": 1, "stop": ["\udc00"], "cache_salt": "\ud800"}
    body = api.post(COMPLETIONS, {**asked, "user": "\ud800"})
    assert body["choices"][0]["text"] == "a\ufffdb one"
    (submit,) = api.router.submits
    assert (submit.params.stops, submit.namespace) == (("\ufffd",), ("\ufffd",))
    messages = [{"role": "user", "content": "\ud800", "name": "\ud800"}]
    assert api.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert api.post(COMPLETIONS, {"prompt": "a", "model": "\ud800"}, 404)["error"]["param"] == "model"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 16_000, b'{"prompt": 1' + b"0" * 5000 + b"}"],
    ids=["empty", "cut", "list", "number", "null", "no-utf8", "deep", "long-number"],
)
def test_a_body_that_is_not_a_json_object_is_refused(api: ApiUnderTest, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        status, _, content = api.send("POST", path, body)
        assert status == 400, content
        error_of(content)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/nothing", None, 404, "not_found_error"),
        ("GET", COMPLETIONS, None, 405, "invalid_request_error"),
        ("POST", COMPLETIONS, {"prompt": "a", "model": "gpt-5"}, 404, "not_found_error"),
        ("POST", CHAT, {**HELLO, "model": "\u00e9"}, 404, "not_found_error"),
        ("POST", "/tokenize", {"prompt": "a", "model": "x"}, 404, "not_found_error"),
        ("GET", "/v1/models/gpt-5", None, 404, "not_found_error"),
    ],
)
def test_unknown_paths_methods_and_models(
    api: ApiUnderTest, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    found, _, content = api.send(method, path, body)
    assert found == status
    assert error_of(content)["type"] == kind


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("kind", "status", "retry"),
    [("invalid", 400, None), ("never_fits", 400, None), ("queue_full", 429, "1"), ("unavailable", 503, "5")],
)
def test_a_refusal_of_the_router_has_its_status_before_a_stream_begins(
    api: ApiUnderTest, kind: Any, status: int, retry: str | None, stream: bool
) -> None:
    api.router.refuse = lambda submit: Refused(submit.request_id, kind, "because")
    found, headers, content = api.send("POST", COMPLETIONS, {"prompt": "a", "stream": stream})
    assert (found, headers["retry-after"]) == (status, retry)
    assert error_of(content)["message"] == "because"
    assert api.client.num_open == 0


def test_answers_are_refused_together(api: ApiUnderTest) -> None:
    api.router.refuse = lambda asked: Refused(asked.request_id, "queue_full", "no")
    api.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 4}, 429)
    assert len({asked.request_id for asked in api.router.submits}) == 8
    assert len({id(asked.submit) for asked in api.router.submits}) == 1
    assert api.client.num_open == 0
    api.router.refuse = lambda asked: None
    api.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert api.router.aborts == []  # the router never knew them


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_requests_are_refused_while_the_service_is_not_ready(api: ApiUnderTest, state: Any) -> None:
    api.call(lambda: api.router.report(state))
    wait_until(lambda: api.client.status.state == state)
    status, headers, content = api.send("POST", CHAT, HELLO)
    assert (status, headers["retry-after"]) == (503, "5")
    assert state in error_of(content)["message"]
    assert not api.router.submits
    assert api.send("GET", "/ready")[0] == 503
    assert api.send("GET", "/health")[0] == 503
    assert api.post(COMPLETIONS, {"prompt": 3}, 400)
    api.call(lambda: api.router.report("ready"))
    wait_until(lambda: api.client.status.state == "ready")
    assert api.send("POST", CHAT, {**HELLO, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("reason", "code", "kind", "retry", "words"),
    [
        ("error", 500, "internal_error", None, "may fail again"),  # a step failed: trying again may not help
        ("invalid", 400, "invalid_request_error", None, "could not be completed"),  # by its grammar
        ("lost", 503, "service_unavailable_error", "5", "try again"),  # a process died
        ("abort", 503, "service_unavailable_error", "5", "try again"),  # the service is shutting down
    ],
    ids=["failed", "invalid", "lost", "aborted"],
)
def test_errors_say_whether_trying_again_may_help_also_in_streams(
    api: ApiUnderTest, reason: str, code: int, kind: str, retry: str | None, words: str
) -> None:
    api.router.fail_after, api.router.fail_reason = 2, reason
    events = api.stream(COMPLETIONS, {"prompt": "a"})
    assert stream_texts(events) == {0: " one two"}
    assert "[DONE]" not in events
    status, headers, content = api.send("POST", COMPLETIONS, {"prompt": "a"})
    assert (status, headers["retry-after"]) == (code, retry)
    for error in (events[-1]["error"], error_of(content)):
        assert (error["code"], error["type"], error["param"]) == (code, kind, None)
        assert "out of luck" in error["message"]
        assert words in error["message"]
    assert f'finished_reason="{reason}",model_name="smol"}} ' in metrics_text(api)


def test_a_failed_answer_aborts_the_other_answers(api: ApiUnderTest) -> None:
    api.router.fail_after, api.router.delay = 2, 0.01
    api.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 100}, 500)
    wait_until(lambda: api.router.num_running == 0)
    assert api.client.num_open == 0


def test_streams_end_when_the_router_dies_and_requests_are_refused(fresh: ApiUnderTest) -> None:
    fresh.router.delay = 0.01
    connection = fresh.connect()
    asked = {"prompt": "a", "stream": True, "max_tokens": 900}
    connection.request("POST", COMPLETIONS, json.dumps(asked), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    fresh.call(fresh.router.die)
    lines = [line.strip() for line in response.read().split(b"\n\n") if line.strip()]
    assert error_of(lines[-1].removeprefix(b"data: "))["code"] == 503
    assert fresh.client.status.state == "dead"
    status, headers, _ = fresh.send("POST", COMPLETIONS, {"prompt": "a"})
    assert (status, headers["retry-after"]) == (503, "5")
    assert fresh.send("GET", "/health")[0] == 503


def test_a_router_that_dies_before_it_answers_is_a_503(fresh: ApiUnderTest) -> None:
    fresh.router.mute = True
    connection = fresh.connect()
    connection.request("POST", COMPLETIONS, b'{"prompt": "a"}', {"Content-Type": "application/json"})
    wait_until(lambda: len(fresh.router.submits) == 1)
    fresh.call(fresh.router.die)
    assert connection.getresponse().status == 503


# Clients that disconnect, and slow clients


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("hold", [False, True], ids=["running", "waiting"])
def test_a_client_that_disconnects_aborts_its_answers(fresh: ApiUnderTest, stream: bool, hold: bool) -> None:
    fresh.router.delay, fresh.router.hold = 0.01, hold
    connection = fresh.connect()
    asked = {"prompt": "a", "n": 3, "stream": stream, "max_tokens": 900}
    connection.request("POST", COMPLETIONS, json.dumps(asked), {"Content-Type": "application/json"})
    wait_until(lambda: fresh.router.num_running == 3)
    connection.close()
    if stream and connection.sock is not None:
        connection.sock.close()
    wait_until(lambda: len(fresh.router.aborts) == 3)
    assert {abort.reason for abort in fresh.router.aborts} == {"abort"}
    wait_until(lambda: fresh.router.num_running == 0)
    assert fresh.client.num_open == 0
    assert 'finished_reason="abort",model_name="smol"} 3.0' in metrics_text(fresh)


def test_a_slow_reader_does_not_stall_others(api: ApiUnderTest) -> None:
    api.router.delay = 0.002  # each event arrives by itself while the client reads
    slow = socket.create_connection(("127.0.0.1", api.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
    asked = {"prompt": "a", "n": 16, "stream": True, "max_tokens": 1000, "logprobs": 3}
    body = json.dumps(asked).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_until(lambda: len(api.router.submits) == 16)
    assert api.post(COMPLETIONS, {"prompt": "a", "max_tokens": 5})["choices"][0]["text"] == TEXT
    wait_until(lambda: api.client.num_open == 0, 20)  # the API reads all events although the client does not
    received = b""
    while b"[DONE]" not in received[-100:]:
        received += slow.recv(65536)
    slow.close()
    assert received.count(b'"finish_reason":"length"') == 16
    assert received.count(b"data: ") < 16_000  # events that arrived while the client did not read are joined


# Keys and limits


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ApiUnderTest]:
    with service(tmp_path, api_key=("sesame é",), max_body_bytes=1000).running() as under_test:
        yield under_test


ROUTES = [
    ("POST", COMPLETIONS),
    ("POST", CHAT),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/metrics"),
    ("GET", "/load"),
    ("GET", "/map"),
    ("GET", "/version"),
    ("GET", "/server_info"),
    ("GET", "/docs"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/sessions/s/release"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "//health"),
    ("GET", "/health/"),
]


def test_the_key_guards_every_route_but_those_of_probes(guarded: ApiUnderTest) -> None:
    bodies = set()
    for method, path in ROUTES:
        for key in (None, "Bearer sesam", "Basic sesame é", "Bearer", "sesame é", "Bearer sesame é!"):
            headers = {} if key is None else {"Authorization": key.encode()}
            status, found, content = guarded.send(method, path, None, headers)  # type: ignore[arg-type]
            assert (status, found["www-authenticate"]) == (401, "Bearer"), (path, key)
            if not path.startswith("/v1/messages"):  # whose errors have an id
                bodies.add(content)
    assert len(bodies) == 1
    assert error_of(bodies.pop())["type"] == "authentication_error"
    key_header: Any = {"Authorization": "bearer sesame é".encode()}
    assert guarded.send("POST", COMPLETIONS, {"prompt": "a"}, key_header)[0] == 200
    assert guarded.send("GET", "/health")[0] == guarded.send("GET", "/ready")[0] == 200
    documented = json.loads(guarded.send("GET", "/openapi.json", headers=key_header)[2])["paths"]
    named = {path.replace("{model}", MODEL).replace("{session_id}", "s") for path in documented}
    assert named - {"/health", "/ready"} <= {path for _, path in ROUTES}


def test_a_metrics_key_opens_the_metrics_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("prometheus from-the-file\n")
    settings: dict[str, Any] = {"metrics_key": ("given",), "metrics_key_file": str(file)}
    with service(tmp_path, api_key=("sesame",), **settings).running() as api:
        for key in ("given", "from-the-file"):
            headers = {"Authorization": f"Bearer {key}"}
            for method, path in ROUTES:
                wanted = 200 if path == "/metrics" else 401
                assert api.send(method, path, None, headers)[0] == wanted, (path, key)
        assert api.send("GET", "/metrics", headers={"Authorization": "Bearer sesame"})[0] == 200
        assert api.send("GET", "/metrics", headers={"Authorization": "Bearer prometheus"})[0] == 401


def test_a_body_too_large_is_refused_with_and_without_a_length(guarded: ApiUnderTest) -> None:
    headers: Any = {"Authorization": "Bearer sesame é".encode(), "Content-Type": "application/json"}
    body = json.dumps({"prompt": "a" * 1000}).encode()
    status, _, content = guarded.send("POST", COMPLETIONS, body, headers)
    assert status == 413
    assert "1000 bytes" in error_of(content)["message"]
    connection = guarded.connect()
    connection.request("POST", COMPLETIONS, iter([body[:500], body[500:]]), headers)  # chunked: no length
    response = connection.getresponse()
    assert (response.status, error_of(response.read())["code"]) == (413, 413)
    assert not guarded.router.submits
