"""A whole service with the options for operators: its processes, its log, its keys and its cache."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.served import API_KEY, Served, save_tiny_model, wait_until

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("operators")
    model = save_tiny_model(directory / "tiny")
    (directory / "keys").write_text(f"alice {API_KEY}\n")
    (directory / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (directory / "service.toml").write_text(
        f'log-requests = true\ndefault-max-tokens = 5\napi-keys-file = "{directory / "keys"}"\n'
        f'chat-template = "{directory / "chat.jinja"}"\n'
    )
    served = Served(model, directory / "log", "--config", str(directory / "service.toml"), api_key=API_KEY)
    try:
        yield served.wait_ready()
    finally:
        served.close()


def log_of(served: Served) -> list[dict[str, Any]]:
    return [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]


def test_the_settings_reach_the_api(served: Served) -> None:
    asked = {"input": "Hello there", "temperature": 0}
    status, body, headers = served.request(RESPONSES, asked)
    assert status == 200
    assert 1 <= body["usage"]["output_tokens"] <= 5
    assert body["usage"]["input_tokens"] == served.request("/tokenize", {"prompt": "Hello there"})[1]["count"]
    wait_until(lambda: any(line["id"] == headers["X-Request-Id"] for line in log_of(served)))
    (line,) = [line for line in log_of(served) if line["id"] == headers["X-Request-Id"]]
    assert (line["route"], line["status"]) == (RESPONSES, 200)
    assert 404 not in [line["status"] for line in log_of(served)]  # the service's own first requests
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    info = served.request("/server_info")[1]
    assert info["configuration"]["default_max_tokens"] == 5
    assert API_KEY not in json.dumps(info)


def test_a_reset_leaves_no_cached_token_and_the_counts_stay_exact(served: Served) -> None:
    served.complete("A text that is cached once it was answered")
    load = served.at_rest()
    assert load["cached"] > 0
    assert served.request("/reset_prefix_cache", {})[1] == {"num_evicted_tokens": load["cached"]}
    load = served.at_rest()
    assert (load["cached"], load["free"]) == (0, load["capacity"])
    with served.stream(60) as events:  # what a running answer holds stays
        evicted = served.request("/reset_prefix_cache", {})[1]["num_evicted_tokens"]
        assert evicted == 0
        for _ in events:
            pass
    assert served.at_rest()["cached"] > 0
    assert served.request("/reset_prefix_cache", {})[1]["num_evicted_tokens"] > 0
    served.complete("The worker takes the edits of the last reset")
    pool = served.request("/map")[1]  # counted on the device

    def agree() -> bool:
        load = served.at_rest()
        return bool((pool["num_free"], pool["num_cached"]) == (load["free"], load["cached"]))

    wait_until(agree)
    assert served.request("/health")[0] == 200
