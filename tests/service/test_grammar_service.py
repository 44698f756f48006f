"""Grammars in a running service: deep chains of references end nothing, and hung-up clients leave nothing."""

import json
import time

import pytest

from tests.support.hard_grammars import chain
from tests.support.served import COMPLETIONS, Start, wait_until


@pytest.mark.slow
def test_deep_chains_beside_a_stream_end_nothing(start: Start) -> None:
    """Depths around what the old stack held and around what is compiled now: each is answered or refused."""
    served = start("--max-num-seqs", "8").wait_ready()
    processes = served.processes()
    statuses = set()
    with served.stream(2000) as events:
        for levels in (50, 300, 430, 470, 2_494, 2_600):
            body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": chain(levels).text}}
            status, content, _ = served.request(COMPLETIONS, body)
            assert status == (200 if levels <= 430 else 400), (levels, content)
            statuses.add(status)
            next(events)
    assert statuses == {200, 400}
    load = served.at_rest()
    assert load["num_worker_starts"] == 1
    now = served.processes()
    assert {name: now[name] for name in processes} == processes


@pytest.mark.slow
def test_clients_that_hang_up_do_not_keep_the_next_one_waiting(start: Start) -> None:
    served = start().wait_ready()
    body = {"prompt": "a", "max_tokens": 2}
    assert served.request(COMPLETIONS, {**body, "structured_outputs": {"regex": "start"}})[0] == 200
    many = []
    for i in range(100):
        connection = served.connect()
        asked = json.dumps({**body, "structured_outputs": {"regex": f"[a-z]{{{1 + i}}}x"}})
        connection.request("POST", COMPLETIONS, asked, {"Content-Type": "application/json"})
        many.append(connection)
    for connection in many:
        connection.close()
    begun = time.monotonic()
    wait_until(
        lambda: served.request(COMPLETIONS, {**body, "structured_outputs": {"regex": "[0-9]+"}})[0] == 200
    )
    assert time.monotonic() - begun < 15
    served.at_rest()
