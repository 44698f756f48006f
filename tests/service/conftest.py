"""Fixtures of the tests that start whole services: a tiny model, a directory for sockets, a starter, and
the recorded steps of a model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightkv.router import EngineConfig
from tests.support.recorded_steps import Recording, saved
from tests.support.served import Start, save_tiny_model, starting


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
