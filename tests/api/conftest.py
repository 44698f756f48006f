"""The services of the tests of the API: one for all tests of a file, and one of a test's own. Servers in this
process end without the waits of uvicorn."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn import server

from tests.support.fake_router import ApiUnderTest, idle, service


@pytest.fixture(scope="session", autouse=True)
def quick_servers() -> Iterator[None]:
    """Until the session ends, uvicorn sleeps for 5 ms where it would sleep for 0.1 s, twice at each end."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)

    with pytest.MonkeyPatch.context() as changed:
        own: Any = SimpleNamespace(**(vars(asyncio) | {"sleep": sleep}))
        changed.setattr(server, "asyncio", own)
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api")).running() as under_test:
        yield under_test


@pytest.fixture
def api(shared: ApiUnderTest) -> ApiUnderTest:
    return idle(shared)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ApiUnderTest]:
    """A service of its own, for tests that count from zero or kill the router."""
    with service(tmp_path).running() as under_test:
        yield under_test
