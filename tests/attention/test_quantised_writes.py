"""What a step leaves in a quantised pool: the same bytes and scales from both backends, with rotary positions
applied on the way or before, and layers that stay as computed beside others."""

import torch

from lightkv import KVSpec
from lightkv.attention import Batch, LayerShape, RotaryEmbedding, Step, make_backends
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from tests.support.combinations import each_value

NAMES = ("int8", "int8-g8", "int4")
DIM = 32


def written(name: str, backend: str, rotated: bool, device: torch.device) -> list[torch.Tensor]:
    """Returns the buffers after a prefill in a quantised and in a skipped layer, and the queries."""
    torch.manual_seed(1)
    spec = KVSpec(2, 2, DIM, DIM, torch.float32, KVFormat.parse(name, (1,)))
    memory = KVMemory(spec, 60, 4, 32, device)
    for buffer in memory.pool.buffers:
        buffer.view(torch.uint8).zero_()
    slots = 1 + torch.randperm(59, device=device)[:32].int()
    memory.table.req_to_token[2] = slots
    layers = make_backends(backend, device, [LayerShape(4, DIM, 2)] * 2)
    step = Step.of(Batch.of([2], [0], [21], 1), memory)
    q = torch.randn(21, 4 * DIM, device=device)
    k, v = (torch.randn(2, 21, 2 * DIM, device=device) * 3).unbind()
    rotary = None
    if rotated:
        cos, sin = torch.randn(2, 21, DIM // 2, device=device)
        rotary = RotaryEmbedding(cos, sin)
    queries = []
    for layer in layers:
        queries.append(q.clone())
        layer.forward(queries[-1], k.clone(), v.clone(), step, rotary)
    return [*memory.pool.buffers, *queries]


@each_value(name=NAMES, rotated=[True, False])
def test_both_backends_write_the_same(name: str, rotated: bool, device: torch.device) -> None:
    ours, expected = (written(name, backend, rotated, device) for backend in ("triton", "torch"))
    assert ours[0].any()
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        if name != "int4":  # after a Hadamard transform elements may be off by one
            assert torch.equal(one, other)
        elif not one.is_floating_point():
            assert (one != other).float().mean() < 0.01
        else:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
