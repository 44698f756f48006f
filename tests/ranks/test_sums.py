"""How terms are added up: which way for which tensors, memory that not all ranks have, where ranks listen."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from lightkv.integrations.ranks import symmetric
from lightkv.integrations.ranks.all_reduce import AllReduce
from lightkv.integrations.ranks.group import RankGroup
from lightkv.integrations.ranks.symmetric import map_memory
from tests.support.ranks import run_ranks

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "way"),
    [
        (torch.bfloat16, 8 * KIB, "one shot"),
        (torch.float32, 64 * KIB, "one shot"),
        (torch.float32, 64 * KIB + 4, "two shots"),
        (torch.bfloat16, 8 * MIB, "two shots"),
        (torch.bfloat16, 8 * MIB + 2, "NCCL"),
        (torch.float16, 8 * KIB, "NCCL"),  # which the operators of symmetric memory refuse
    ],
)
def test_the_way_is_that_of_the_size_and_takes_the_type(dtype: torch.dtype, num_bytes: int, way: str) -> None:
    used: list[str] = []

    def noted(name: str, x: Tensor) -> Tensor:
        used.append(name)
        return x

    ways = {name: lambda x, name=name: noted(name, x) for name in ("NCCL", "one shot", "two shots")}
    sums = AllReduce(ways)  # type: ignore[arg-type]
    sums.sum(torch.zeros(num_bytes // dtype.itemsize, dtype=dtype))
    assert used == [way]
    assert sums.lines == ["sums over ranks: one shot up to 64 KiB, two shots up to 8 MiB, NCCL above"]


def test_without_mapped_memory_the_library_adds_up_everything() -> None:
    sums = AllReduce({"NCCL": lambda x: x + 1})
    assert sums.sum(torch.zeros(2)).tolist() == [1, 1]
    assert sums.lines == ["sums over ranks: NCCL"]


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
