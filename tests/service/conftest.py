"""Fixtures of the tests of the service: a tiny model, a directory for sockets, a starter of whole services, the
recorded steps of a model, and routers in this process that report often."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightkv.router import EngineConfig
from lightkv.router.service import router as router_module
from tests.support.recorded_steps import Recording, saved
from tests.support.served import Start, save_tiny_model, starting


@pytest.fixture(autouse=True)
def frequent_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes routers in this process send their status often, because clients of tests wait for what it says."""
    monkeypatch.setattr(router_module, "STATUS_SECONDS", 0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recording(config: EngineConfig) -> Recording:
    return Recording(config)


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """A directory for sockets, whose path is short enough."""
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def start(model: Path, tmp_path: Path, sockets: Path) -> Iterator[Start]:
    """A function that starts a service with its sockets in `sockets`."""
    with starting(model, tmp_path / "log", sockets) as begin:
        yield begin
