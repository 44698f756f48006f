"""Memory that not all ranks have, and where ranks listen."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from lightkv.integrations.ranks import symmetric
from lightkv.integrations.ranks.group import RankGroup
from lightkv.integrations.ranks.symmetric import map_memory
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("has_own", [True, False])
def test_no_rank_waits_for_one_that_has_no_memory_to_map(
    has_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(num_bytes: int, **settings: Any) -> Tensor:
        if not has_own:
            raise torch.OutOfMemoryError("no memory is left")
        return torch.empty(num_bytes, dtype=torch.uint8)

    asked: list[bool] = []

    def another_has_none(works: bool) -> bool:
        asked.append(works)
        return False

    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *_: pytest.fail("the other rank is not there"))
    monkeypatch.setattr(symmetric, "all_agree", another_has_none)
    assert map_memory(64, torch.device("cpu")) is None
    assert asked == [has_own]


def addresses(ranks: RankGroup) -> tuple[set[str], str]:
    """Returns the addresses on which this process listens, in hexadecimal, and what NCCL is told."""
    assert ranks.smallest(ranks.rank) == 0  # they have connected
    sockets = {os.readlink(fd)[8:-1] for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
    ]
    listening = {line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}
    return listening, os.environ["NCCL_SOCKET_IFNAME"]


def test_ranks_listen_on_the_loopback_interface_alone() -> None:
    assert run_ranks(2, addresses) == [({"0100007F"}, "lo")] * 2
