"""The services of the tests of the API: one for all tests of a file, and one of a test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_router import ApiUnderTest, idle, service


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
