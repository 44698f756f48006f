"""A whole service with the options for operators: log, keys, cache, and what a kill leaves of it."""

import json
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightkv.router.service.router_client import MAP_SECONDS
from tests.support.served import API_KEY, Served, SharedService, wait_until

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedService]:
    """A service on a Unix socket."""

    def begin() -> Served:
        directory = tmp_path_factory.mktemp("operators")
        (directory / "t").mkdir()
        (directory / "keys").write_text(f"alice {API_KEY}\n")
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (directory / "chat.jinja").write_text(template)
        (directory / "service.toml").write_text(
            f'log-requests = true\ndefault-max-tokens = 5\napi-key-file = "{directory / "keys"}"\n'
            f'chat-template = "{directory / "chat.jinja"}"\n'
        )
        options = ["--config", str(directory / "service.toml"), "--uds", str(directory / "public.sock")]
        env = {"TMPDIR": str(directory / "t")}
        return Served(model, directory / "log", *options, api_key=API_KEY, env=env)

    with closing(SharedService(begin)) as service:
        yield service


@pytest.fixture
def served(service: SharedService) -> Served:
    return service.running()


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


def pool_of(served: Served) -> dict[str, Any]:
    """Returns the counts of /map, which the worker takes from the device. A younger map is returned again."""
    time.sleep(1.1 * MAP_SECONDS)
    status, pool, _ = served.request("/map")
    assert status == 200
    return pool


def reset(served: Served) -> int:
    status, body, _ = served.request("/reset_prefix_cache", {})
    assert status == 200
    return int(body["num_evicted_tokens"])


def test_a_reset_leaves_no_cached_token_and_the_counts_stay_exact(served: Served) -> None:
    served.complete("A text that is cached once it was answered")
    pool = pool_of(served)
    assert pool["num_cached"] > 0
    assert reset(served) == pool["num_cached"]
    pool = pool_of(served)
    assert (pool["num_cached"], pool["num_free"]) == (0, pool["capacity"])
    load = served.at_rest()
    assert (load["cached"], load["free"]) == (0, load["capacity"])  # of the status before the answer
    with served.stream(60) as events:  # what a running answer holds stays
        assert reset(served) == 0
        for _ in events:
            pass
    assert pool_of(served)["num_cached"] > 0
    assert reset(served) > 0
    served.complete("The worker takes the edits of the last reset")
    pool = pool_of(served)
    assert pool["num_cached"] > 0
    assert pool["num_free"] + pool["num_cached"] == pool["capacity"]
    assert served.request("/health")[0] == 200


def test_all_that_a_service_with_one_key_has_done_is_that_keys(served: Served) -> None:
    served.complete("A text for its key", max_tokens=7)
    load = served.at_rest()
    (name,) = load["by_key"]
    used = load["by_key"][name]
    assert name == "alice"
    for of_key, total in (
        ("prompt_tokens", "prompt_tokens"),
        ("cached_tokens", "hit_tokens"),
        ("generated_tokens", "generated_tokens"),
    ):
        assert used[of_key] == load[total]
    assert used["generated_tokens"] >= 7
    assert used["held"] == 0


def test_no_process_or_file_outlives_a_killed_launcher(served: Served) -> None:
    """The public socket is removed, and the private one together with its temporary directory."""
    public, temporary = served.log.parent / "public.sock", served.log.parent / "t"
    assert served.url == f"unix:{public}"
    assert stat.S_IMODE(public.stat().st_mode) == 0o600
    assert served.complete()
    assert len(list(temporary.iterdir())) == 1
    served.process.kill()
    assert served.wait() == -signal.SIGKILL
    assert not public.exists()
    assert not list(temporary.iterdir())
