"""Decodes that compute several tokens each, as to verify guesses: attention in float64, and what is refused."""

import pytest
import torch

from lightkv.attention import Batch, BatchShape, StaticStep, Step, make_backends
from lightkv.attention.forms.rings import over_rings
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.attention.histories import CASES, TOLERANCE, History, on
from tests.support.combinations import slow

# (rows, counts, number of prefills, tokens of each decode) of each step
STEPS = [
    ([1, 2, 3], [9, 1, 5], 3, 1),
    ([4, 3, 2], [7, 3, 3], 1, 3),
    ([1, 2, 3, 4], [2, 2, 2, 2], 0, 2),
    ([2], [6], 0, 6),
]


@pytest.mark.parametrize(
    "case", ["softcap-window", "chunk-5", "sinks", "alibi", *slow("gqa-3", "v-narrower", "mqa", "window-5")]
)
def test_decodes_of_several_tokens(case: str, device: torch.device) -> None:
    torch.manual_seed(0)
    shape, dtype = on(CASES[case], device), torch.float32
    history = History(shape, dtype, device)
    backend = make_backends("triton", device, [shape, shape])[1]
    for rows, counts, num_prefills, num_queries in STEPS:
        starts, total = history.place(rows, counts), sum(counts)
        step = Step.of(Batch.of(rows, starts, counts, num_prefills, num_queries), history.memory)
        q = torch.randn(total, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
        k = torch.randn(total, shape.num_kv_heads, shape.head_dim, device=device, dtype=dtype)
        v = torch.randn(total, shape.num_kv_heads, history.v_dim, device=device, dtype=dtype)
        history.append(rows, counts, k, v)
        out = backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), step)
        expected = torch.cat(
            [history.attend(row, part) for row, part in zip(rows, q.split(counts), strict=True)]
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected.flatten(1), rtol=tolerance, atol=tolerance)


def test_what_decodes_of_several_tokens_are_refused(device: torch.device) -> None:
    history = History(CASES["mqa"], torch.float32, device)
    history.place([1, 2], [3, 3])
    with pytest.raises(ValueError, match="num_queries 2"):
        Batch.of([1, 2], [0, 0], [2, 3], 0, num_queries=2)
    several = Batch.of([1, 2], [0, 0], [2, 2], 0, num_queries=2)
    with pytest.raises(ValueError, match="2 tokens a decode"):
        over_rings(several, Ring(0, 8))
    with pytest.raises(ValueError, match="only plain decodes of one token"):
        several.sharing([], 4)
    static = StaticStep(BatchShape.of_decodes(4), history.memory)
    with pytest.raises(ValueError, match="each has one"):
        static.load(several)
    (backend,) = make_backends("torch", device, [CASES["mqa"]])
    q, k, v = (torch.zeros(4, heads * 16, device=device) for heads in (4, 1, 1))
    with pytest.raises(ValueError, match="run them as prefills"):
        backend.forward(q, k, v, Step.of(several, history.memory))
