"""The bias of a layer's projection through TensorRT-LLM's contract: what is attended to and stored is what a
model that adds the bias itself gets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightkv.contracts.tensorrt_llm import AttentionBackend, AttentionMetadata
from tests.support.contracts.trt_batch import FP8, MIXED, Batch, KernelBackend, close_to

Call = Callable[[AttentionBackend, Batch, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
WIDTHS = [4 * 16, 2 * 16, 2 * 16]  # of q, K and V in a batch of the default shape


def make_bias(device: torch.device, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(sum(WIDTHS), device=device).to(dtype)


def compare(
    device: torch.device,
    call: Call,
    kind: type = AttentionBackend,
    bias_type: torch.dtype = torch.float16,
    limit: float = 0.0,
    **changes: Any,
) -> None:
    """Runs `call` on a layer with a bias, and on one without whose inputs have it already; outputs and blocks
    have to be equal, or within `limit` where a cache rounds what is not rounded to the inputs' type."""
    bias = make_bias(device, bias_type)
    outs, blocks = [], []
    for is_inside in (True, False):
        batch = Batch(device, **{**MIXED, **changes})
        batch.metadata.prepare()
        layer = batch.backend(kind=kind, qkv_bias=bias if is_inside else None)
        inputs = [batch.q[0], *batch.new_keys()]
        given = [one.clone() for one in inputs]
        if not is_inside:
            parts = zip(inputs, bias.float().split(WIDTHS), strict=True)
            inputs = [(one.float() + part).to(one.dtype) for one, part in parts]
        outs.append(call(layer, batch, *inputs))
        if is_inside:
            assert all(torch.equal(one, old) for one, old in zip(inputs, given, strict=True))
        buffer = batch.manager.get_buffers(0)[1:]
        blocks.append(buffer.float() if limit else buffer.view(torch.int16))
    if limit:
        close_to(outs[0], outs[1].double(), atol=limit, rtol=limit)
        torch.testing.assert_close(blocks[0], blocks[1], atol=1.0, rtol=0.07, equal_nan=True)
    else:
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(blocks[0], blocks[1])


CALLS: dict[str, Call] = {
    "apart": lambda layer, b, q, k, v: layer.forward(q, k, v, b.metadata),
    "fused": lambda layer, b, q, k, v: layer.forward(torch.cat((q, k, v), 1), None, None, b.metadata),
    "k and v fused": lambda layer, b, q, k, v: layer.forward(q, torch.cat((k, v), 1), None, b.metadata),
    "only q": lambda layer, b, q, k, v: layer.forward(q, None, None, kept(layer, b), update_kv_cache=False),
}


def kept(layer: AttentionBackend, batch: Batch) -> AttentionMetadata:
    """Another layer has stored this step's keys, so the bias of this one is for its queries alone."""
    batch.backend().forward(batch.q[0], *batch.new_keys(), batch.metadata)
    return batch.metadata


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bias_type", [torch.float16, torch.float32], ids=str)
def test_a_bias_is_added_to_q_and_to_what_is_stored(
    device: torch.device, name: str, bias_type: torch.dtype
) -> None:
    compare(device, CALLS[name], bias_type=bias_type)


def test_the_kernels_add_the_bias(device: torch.device) -> None:
    compare(device, CALLS["fused"], kind=KernelBackend, q_lens=[5, 1, 1], cached=[9, 12, 3], num_contexts=1)


@pytest.mark.parametrize("kind", [AttentionBackend, KernelBackend])
@pytest.mark.parametrize("cache_dtype", [torch.int8, pytest.param(FP8, marks=pytest.mark.gpu)], ids=str)
def test_a_bias_before_quantising(device: torch.device, kind: type, cache_dtype: torch.dtype) -> None:
    def call(layer: AttentionBackend, batch: Batch, *inputs: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([0.04], device=device)
        return layer.forward(*inputs, batch.metadata, kv_scale_quant_orig=scale)

    small: dict[str, Any] = {"q_lens": [5, 1, 1], "cached": [9, 12, 3], "num_contexts": 1}
    compare(device, call, kind, limit=3e-2, cache_dtype=cache_dtype, scale=0.04, **small)


def test_a_bias_without_a_cache_and_in_a_padded_batch(device: torch.device) -> None:
    def without(layer: AttentionBackend, batch: Batch, *inputs: torch.Tensor) -> torch.Tensor:
        batch.metadata.kv_cache_manager = batch.metadata.kv_cache_params = None
        batch.metadata.prepare()
        return layer.forward(*inputs, batch.metadata)

    def padded(layer: AttentionBackend, batch: Batch, *inputs: torch.Tensor) -> torch.Tensor:
        static = batch.metadata.create_cuda_graph_metadata(3, max_draft_tokens=2)
        static.seq_lens = torch.tensor(batch.q_lens, dtype=torch.int32)
        static.prepare()
        more = [torch.nn.functional.pad(one, (0, 0, 0, 3), value=float("nan")) for one in inputs]
        out = layer.forward(*more, static)
        assert not out[6:].any()
        return out

    compare(device, without, q_lens=[5, 9], cached=[0, 0], num_contexts=2)
    compare(device, padded, q_lens=[2, 3, 1], cached=[4, 9, 5], num_contexts=3)


def test_a_bias_in_cross_attention(device: torch.device) -> None:
    """q and the encoder's K and V have it when they come; later steps read what is stored."""

    def call(layer: AttentionBackend, batch: Batch, *inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = inputs
        first = layer.forward(q, None, None, batch.metadata, cross_kv=torch.cat((k, v), 1))
        batch.metadata.seq_lens_kv = torch.zeros(2, dtype=torch.int32)
        batch.metadata.kv_cache_params.num_cached_tokens_per_seq = batch.lengths
        batch.metadata.prepare()
        return torch.cat((first, layer.forward(q, None, None, batch.metadata)))

    compare(device, call, q_lens=[3, 5], kv_lens=[9, 4], cached=[0, 5], num_contexts=2)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(127),
        torch.zeros(1, 128),
        torch.zeros(128, dtype=torch.int32),
        torch.zeros(256)[::2],
        [0.0] * 128,
    ],
    ids=["short", "two dims", "integers", "strided", "a list"],
)
def test_biases_that_do_not_fit(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"qkv_bias must be contiguous floats \[n\], with n 128; got "):
        AttentionBackend(0, 4, 16, 2, qkv_bias=wrong)
    layer = AttentionBackend(0, 4, 16, 2)
    with pytest.raises(ValueError, match="contiguous floats"):
        layer.qkv_bias = wrong
    assert layer.qkv_bias is None


def test_a_bias_that_is_set_later_and_one_elsewhere(device: torch.device) -> None:
    batch = Batch(device, **MIXED)
    batch.metadata.prepare()
    layer = batch.backend()
    before = batch.manager.get_buffers(0).view(torch.int16).clone()
    layer.qkv_bias = torch.zeros(128, device="meta")
    with pytest.raises(ValueError, match="qkv_bias is on meta"):
        layer.forward(batch.q[0], *batch.new_keys(), batch.metadata)
    assert torch.equal(batch.manager.get_buffers(0).view(torch.int16), before)
    layer.qkv_bias = torch.nn.Parameter(
        torch.zeros(128, device=device)
    )  # as a module's, which loads it later
    found = layer.forward(batch.q[0], *batch.new_keys(), batch.metadata)
    assert not found.requires_grad
    close_to(found, batch.expected())
    layer.qkv_bias.data[:64] += 1.0
    moved = layer.forward(batch.q[0] - 1.0, *batch.new_keys(), batch.metadata)
    close_to(moved, batch.expected())
    layer.qkv_bias = None
    close_to(layer.forward(batch.q[0], *batch.new_keys(), batch.metadata), batch.expected())
