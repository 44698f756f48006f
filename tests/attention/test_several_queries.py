"""Decodes that compute several tokens each, as to verify guesses: attention in float64, and what is refused."""

import pytest
import torch

from lightkv.attention import AttentionMetadata, make_backends
from lightkv.integrations.cached_model import CachedModel
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layout.ring import Ring
from tests.attention.test_attention import CASES, MAX_SEQUENCES, TOLERANCE, History, on
from tests.support.tiny_models import tiny_llama

# (rows, counts, number of prefills, tokens of each decode) of each step
STEPS = [
    ([1, 2, 3], [9, 1, 5], 3, 1),
    ([4, 3, 2], [7, 3, 3], 1, 3),
    ([1, 2, 3, 4], [2, 2, 2, 2], 0, 2),
    ([2], [6], 0, 6),
]


@pytest.mark.parametrize(
    "case", ["gqa-3", "mqa", "v-narrower", "window-5", "softcap-window", "chunk-5", "sinks", "alibi"]
)
def test_decodes_of_several_tokens(case: str, device: torch.device) -> None:
    torch.manual_seed(0)
    shape, dtype = on(CASES[case], device), torch.float32
    history = History(shape, dtype, device)
    backend = make_backends("triton", device, [shape, shape])[1]
    metadata = AttentionMetadata(MAX_SEQUENCES, 64, history.memory)
    for rows, counts, num_prefills, num_queries in STEPS:
        starts, total = history.place(rows, counts), sum(counts)
        metadata.prepare(rows, starts, counts, num_prefills, num_queries=num_queries)
        q = torch.randn(total, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
        k = torch.randn(total, shape.num_kv_heads, shape.head_dim, device=device, dtype=dtype)
        v = torch.randn(total, shape.num_kv_heads, history.v_dim, device=device, dtype=dtype)
        history.append(rows, counts, k, v)
        out = backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), metadata)
        expected = torch.cat(
            [history.attend(row, part) for row, part in zip(rows, q.split(counts), strict=True)]
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected.flatten(1), rtol=tolerance, atol=tolerance)


def test_what_decodes_of_several_tokens_are_refused(device: torch.device) -> None:
    history = History(CASES["mqa"], torch.float32, device)
    metadata = AttentionMetadata(MAX_SEQUENCES, 64, history.memory)
    history.place([1, 2], [3, 3])
    with pytest.raises(ValueError, match="num_queries 2"):
        metadata.prepare([1, 2], [0, 0], [2, 3], 0, num_queries=2)
    with pytest.raises(ValueError, match="each has one"):
        metadata.prepare([1], [8], [2], 0, num_queries=2, ring=Ring(0, 8))
    with pytest.raises(ValueError, match="each has one"):
        metadata.create_cuda_graph_metadata(2).prepare([1], [0], [2], 0, num_queries=2)
    assert metadata.num_tokens == 0
    metadata.prepare([1, 2], [0, 0], [2, 2], 0, num_queries=2)
    (backend,) = make_backends("torch", device, [CASES["mqa"]])
    q, k, v = (torch.zeros(4, heads * 16, device=device) for heads in (4, 1, 1))
    with pytest.raises(ValueError, match="run them as prefills"):
        backend.forward(q, k, v, metadata)


def test_a_model_says_which_decodes_it_can(device: torch.device) -> None:
    model = tiny_llama(device, 0)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    most = tuning.MOST_DECODE_ROWS // group
    lm = CachedModel(model, 40, backend="triton")
    assert lm.can_decode([most])
    assert lm.can_decode([2, 2])
    assert not lm.can_decode([most + 1])
    assert not lm.can_decode([2, 3])
    assert not CachedModel(tiny_llama(device, 0), 40, backend="torch").can_decode([2])
