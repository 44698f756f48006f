"""Memory that not all ranks have."""

from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from lightkv.integrations.ranks import symmetric
from lightkv.integrations.ranks.symmetric import map_memory


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
