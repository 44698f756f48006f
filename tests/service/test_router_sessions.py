"""Sessions in the router: what is submitted with one is protected until it is released or its client leaves."""

from array import array
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig

from lightkv.ledger import TokenLedger
from lightkv.router.config import EngineConfig
from lightkv.router.engine.loop import make_scheduler
from lightkv.router.engine.step import Limits
from lightkv.router.model.sizes import EngineSizes
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.messages import Accepted, Load, NewAnswer, NewPrompt, ReleaseSession, Submit
from tests.support import router_service
from tests.support.router_service import Client, Service, service


@pytest.fixture(autouse=True)
def with_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' pool of 200 tokens has a quarter for sessions."""
    limits = Limits(4, 100, 16, 300, session_share=0.25)
    monkeypatch.setattr(router_service, "INFO", msgspec.structs.replace(router_service.INFO, limits=limits))


async def turn(client: Client, name: str, prompt: list[int], session: str | None) -> None:
    """Sends a request with five new tokens, and waits for its end."""
    params = SamplingParams(max_tokens=5, temperature=0.0)
    client.stream.send(
        Submit([NewPrompt(array("i", prompt).tobytes(), [NewAnswer(name, 1)])], params, [], session=session)
    )
    while (answer := await client.take()) is None:
        pass
    assert answer == Accepted(name)
    await client.until_ended(name)


async def counted(client: Client, num_sessions: int, tokens: int) -> Load:
    status = await client.until(
        lambda status: (status.load.num_sessions, status.load.session_tokens) == (num_sessions, tokens)
    )
    return status.load


def ledger_of(made: Service) -> TokenLedger:
    engine = made.router._engine
    assert engine is not None
    assert isinstance(engine.scheduler.ledger, TokenLedger)
    return engine.scheduler.ledger


async def test_a_session_protects_its_tokens_until_it_is_released(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client = await made.connect()
        await turn(client, "1", [7] * 20, "a")
        await counted(client, 1, 24)
        for i in range(12):  # the pool is turned over
            await turn(client, f"other {i}", [20 + i] * 30, None)
        assert ledger_of(made).match(array("i", [7] * 21).tobytes()).num_tokens == 20
        await turn(client, "2", [8] * 30, "b")  # more than the share with the other
        load = await counted(client, 1, 34)
        assert (load.session_evicted_tokens, load.session_over_share_tokens) == (0, 24)
        client.stream.send(ReleaseSession("b"))
        client.stream.send(ReleaseSession("unknown"))
        await counted(client, 0, 0)
        made.router._engine.check()  # type: ignore[union-attr]


def test_the_setting_reaches_the_ledger() -> None:
    """EngineConfig → the worker's limits → the router's ledger."""
    sizes = EngineSizes(EngineConfig(session_share=0.125), torch.device("cpu"), LlamaConfig())
    info = msgspec.structs.replace(router_service.INFO, limits=sizes.limits)
    ledger = make_scheduler(info).ledger
    assert isinstance(ledger, TokenLedger)
    assert ledger._state.sessions.limit == router_service.CAPACITY // 8


async def test_the_sessions_of_a_client_end_when_it_leaves(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client, other = await made.connect(), await made.connect()
        await turn(client, "1", [7] * 10, "a")
        await turn(other, "2", [8] * 10, "b")
        await counted(other, 2, 28)
        client.stream.close()
        await counted(other, 1, 14)


async def test_another_worker_begins_without_sessions_and_the_totals_stay(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client = await made.connect()
        await turn(client, "1", [7] * 40, "a")
        await turn(client, "2", [8] * 40, "b")
        await counted(client, 1, 44)
        before = made.router.load()
        made.workers[0].kill()
        status = await client.until(lambda status: status.state == "starting")
        assert (status.load.cached, status.load.num_sessions, status.load.step_age) == (0, 0, 0)
        await client.until(lambda status: status.load.num_worker_starts == 2)
        load = await counted(client, 0, 0)
        assert load.session_over_share_tokens == 44
        client.stream.send(ReleaseSession("b"))  # which the new engine does not know
        await client.until(lambda status: status.state == "ready")
        await turn(client, "3", [9] * 20, "a")
        await counted(client, 1, 24)
        made.workers[1].kill()
        await client.until(lambda status: status.load.num_worker_starts == 3)
        load = made.router.load()
        assert (load.prompt_tokens, load.generated_tokens, load.reached_peak) == (
            100,
            15,
            before.reached_peak,
        )
