"""What TensorRT-LLM's attention backend computes over lightkv, compared with dense attention in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightkv.contracts.tensorrt_llm import (
    AttentionBackend,
    AttentionForwardArgs,
    AttentionMetadata,
    AttentionRuntimeFeatures,
    CacheType,
    KVCacheParams,
)
from tests.support.combinations import each_pair, slow
from tests.support.contracts.trt_batch import FP8, HALF, MIXED, Batch, ForeignManager, KernelBackend, close_to

LAYOUTS = [
    {"tokens_per_block": 8, "kv_layout": "HND"},
    {"tokens_per_block": 8, "kv_layout": "NHD"},
    {"tokens_per_block": 6, "kv_layout": "HND"},  # no power of two
    {"tokens_per_block": None, "cache_type": CacheType.PER_TOKEN},
    {"tokens_per_block": None, "cache_type": CacheType.PER_TOKEN, "kv_layout": "NHD"},
    {"tokens_per_block": None, "cache_type": CacheType.LINEAR},
]


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4], *slow(*LAYOUTS[1::2])], ids=str)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_contexts_and_generations_over_layers(
    device: torch.device, layout: dict[str, Any], mask: str
) -> None:
    batch = Batch(device, **MIXED, num_layers=2, **layout)
    batch.metadata.prepare()
    for layer_idx in range(2):
        k, v = batch.new_keys(layer_idx)
        found = batch.backend(layer_idx).forward(
            batch.q[layer_idx], k, v, batch.metadata, attention_mask=mask
        )
        close_to(found, batch.expected(layer_idx, causal=mask == "causal"))
    # The next step reads what this one has written: another query of each sequence, over the same keys.
    batch.cached, batch.q_lens, batch.kv_lens = batch.lengths, [1] * 5, [0] * 5
    batch.metadata.seq_lens = torch.ones(5, dtype=torch.int32)
    batch.metadata.num_contexts = 0
    less = [length - 1 for length in batch.lengths]
    batch.metadata.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=less)
    batch.metadata.prepare()
    batch.q = [one[:5] for one in batch.q]
    for layer_idx in range(2):
        found = batch.backend(layer_idx).forward(
            batch.q[layer_idx], None, None, batch.metadata, update_kv_cache=False
        )
        close_to(found, batch.expected(layer_idx))


@pytest.mark.parametrize("layout", [LAYOUTS[0], *slow(LAYOUTS[1]), LAYOUTS[3]], ids=str)
@pytest.mark.parametrize(
    "cache_dtype",
    # The interpreter rounds to fp8 in another way.
    [torch.float16, pytest.param(FP8, marks=pytest.mark.gpu), torch.int8],
    ids=str,
)
def test_the_kernels_compute_the_same(
    device: torch.device, layout: dict[str, Any], cache_dtype: torch.dtype
) -> None:
    scale = 1.0 if cache_dtype == torch.float16 else 0.04
    found, buffers = [], []
    for kind in (AttentionBackend, KernelBackend):
        batch = Batch(device, [5, 1, 1], [9, 12, 3], 1, cache_dtype=cache_dtype, scale=scale, **layout)
        if scale != 1.0:
            batch.manager.set_kv_scale(0, scale)
        batch.metadata.prepare()
        k, v = batch.new_keys()
        found.append(batch.backend(kind=kind).forward(batch.q[0], k, v, batch.metadata))
        buffers.append(batch.manager.get_buffers(0).view(torch.uint8)[1:])
    close_to(found[1], found[0].double(), atol=1e-2, rtol=1e-2)
    assert torch.equal(buffers[0], buffers[1])


@pytest.mark.parametrize("kind", [AttentionBackend, KernelBackend])
def test_windows_sinks_chunks_and_scaling(device: torch.device, kind: type) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    for arguments, wanted, own in (
        ({"attention_window_size": 4, "attention_sinks": sinks}, {"window": 4, "sinks": sinks}, {}),
        ({}, {"chunk": 8}, {"attention_chunk_size": 8}),
        ({}, {"scale": 0.5 * 16**-0.5}, {"q_scaling": 2.0}),
    ):
        batch = Batch(device, [7, 1, 1], [6, 12, 3], 1)
        batch.metadata.prepare()
        k, v = batch.new_keys()
        args = AttentionForwardArgs(**arguments)  # type: ignore[arg-type]
        found = batch.backend(kind=kind, **own).forward(batch.q[0], k, v, batch.metadata, args)
        close_to(found, batch.expected(**wanted))  # type: ignore[arg-type]


def test_fused_inputs_and_given_outputs(device: torch.device) -> None:
    def forward(call: Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        batch = Batch(device, **MIXED)
        batch.metadata.prepare()
        return call(batch, *batch.new_keys())

    plain = forward(lambda b, k, v: b.backend().forward(b.q[0], k, v, b.metadata))
    fused = forward(
        lambda b, k, v: b.backend().forward(
            torch.cat((b.q[0], k, v), 1), None, None, b.metadata, is_fused_qkv=True
        )
    )
    fused_kv = forward(lambda b, k, v: b.backend().forward(b.q[0], torch.cat((k, v), 1), None, b.metadata))
    assert torch.equal(plain, fused)
    assert torch.equal(plain, fused_kv)

    output = torch.empty_like(plain)
    same = forward(lambda b, k, v: b.backend().forward(b.q[0], k, v, b.metadata, output=output))
    assert same is output
    assert torch.equal(output, plain)
    wide = torch.zeros(len(plain), 2 * plain.shape[1], dtype=plain.dtype, device=device)
    half = wide[:, : plain.shape[1]]
    forward(lambda b, k, v: b.backend().forward(b.q[0], k, v, b.metadata, output=half))
    assert torch.equal(half, plain)
    with pytest.raises(ValueError, match="output must be"):
        forward(lambda b, k, v: b.backend().forward(b.q[0], k, v, b.metadata, output=output[:-1]))


def test_output_in_fp8(device: torch.device) -> None:
    batch = Batch(device, **MIXED)
    batch.metadata.prepare()
    k, v = batch.new_keys()
    layer, out_scale = batch.backend(), torch.tensor([3.0], device=device)
    (output,) = layer.create_output(batch.q[0], out_scale=out_scale)
    assert output.dtype == FP8
    assert layer.create_output(batch.q[0])[0].dtype == torch.float16
    wanted = batch.expected() * 3
    for given in (None, output):
        found = layer.forward(batch.q[0], k, v, batch.metadata, output=given, out_scale=out_scale)
        assert found.dtype == FP8
        close_to(found, wanted, atol=5e-2, rtol=7e-2)
    huge = layer.forward(batch.q[0], k, v, batch.metadata, out_scale=torch.tensor([1e9], device=device))
    assert huge.float().abs().max() == 448
    layer.forward(batch.q[0], k, v, batch.metadata, output=output)
    close_to(output, wanted / 3, atol=5e-2, rtol=7e-2)
    with pytest.raises(ValueError, match="output must be"):
        layer.forward(
            batch.q[0], k, v, batch.metadata, output=torch.empty_like(batch.q[0]), out_scale=out_scale
        )


@pytest.mark.parametrize("cache_dtype", [FP8, torch.int8], ids=str)
def test_scales_of_keys_and_values(device: torch.device, cache_dtype: torch.dtype) -> None:
    scale = torch.tensor([0.03], device=device)
    for given in (
        {"kv_scale_orig_quant": 1 / scale},
        {"kv_scale_quant_orig": scale},
        {"kv_scale_orig_quant": 1 / scale, "kv_scale_quant_orig": scale},
        {},
    ):
        batch = Batch(device, **MIXED, cache_dtype=cache_dtype, scale=0.03)
        if not given:
            batch.manager.set_kv_scale(0, 0.03)
        batch.metadata.prepare()
        k, v = batch.new_keys()
        found = batch.backend().forward(batch.q[0], k, v, batch.metadata, **given)
        close_to(found, batch.expected(), atol=5e-3, rtol=5e-3)
    # Both are used: writing by one, reading by the other.
    found = batch.backend().forward(
        batch.q[0], k, v, batch.metadata, kv_scale_orig_quant=1 / scale, kv_scale_quant_orig=scale * 0
    )
    assert not found.any()
    with pytest.raises(ValueError, match="one number"):
        batch.backend().forward(batch.q[0], k, v, batch.metadata, kv_scale_quant_orig=scale.expand(2))
    half = Batch(device, **MIXED)
    half.metadata.prepare()
    with pytest.raises(ValueError, match="float8_e4m3fn or int8"):
        half.backend().forward(half.q[0], k, v, half.metadata, kv_scale_quant_orig=scale)


def test_the_cache_is_what_quant_config_says(device: torch.device) -> None:
    class Mode:
        def has_fp8_kv_cache(self) -> bool:
            return True

    class Config:
        layer_quant_mode = Mode()

    for cache_dtype in (FP8, torch.float16):
        batch = Batch(device, **MIXED, cache_dtype=cache_dtype)
        batch.metadata.prepare()
        layer = batch.backend(quant_config=Config())
        if cache_dtype == FP8:
            layer.forward(batch.q[0], *batch.new_keys(), batch.metadata)
            continue
        with pytest.raises(ValueError, match="has_fp8_kv_cache"):
            layer.forward(batch.q[0], *batch.new_keys(), batch.metadata)
        layer.update_quant_config(None)
        layer.forward(batch.q[0], *batch.new_keys(), batch.metadata)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_keys_that_another_layer_has_written(device: torch.device, mask: str) -> None:
    batch = Batch(device, **MIXED)
    batch.metadata.prepare()
    k, v = batch.new_keys()
    before = batch.manager.get_buffers(0).view(torch.int16).clone()
    arguments: dict[str, Any] = {"update_kv_cache": False, "attention_mask": mask}
    with pytest.raises(ValueError, match="give None for both if it holds them"):
        batch.backend().forward(batch.q[0], k, v, batch.metadata, **arguments)
    assert torch.equal(batch.manager.get_buffers(0).view(torch.int16), before)
    batch.backend().forward(batch.q[0], k, v, batch.metadata, attention_mask=mask)
    close_to(
        batch.backend().forward(batch.q[0], None, None, batch.metadata, **arguments),
        batch.expected(causal=mask == "causal"),
    )


@pytest.mark.parametrize("kind", [AttentionBackend, KernelBackend])
def test_without_a_cache(device: torch.device, kind: type) -> None:
    batch = Batch(device, [5, 9, 1], [0, 0, 0], 3)
    for manager, params in (
        (None, None),
        (batch.manager, KVCacheParams(use_cache=False, num_cached_tokens_per_seq=[])),
    ):
        batch.metadata.kv_cache_manager, batch.metadata.kv_cache_params = manager, params
        batch.metadata.seq_lens = batch.metadata.seq_lens.clone()
        batch.metadata.prepare()
        mask = "causal" if manager is None else "full"
        found = batch.backend(kind=kind).forward(
            batch.q[0], *batch.new_keys(), batch.metadata, attention_mask=mask
        )
        close_to(found, batch.expected(causal=manager is None))
    with pytest.raises(ValueError, match="no k is given"):
        batch.backend().forward(batch.q[0], None, None, batch.metadata, update_kv_cache=False)


@pytest.mark.parametrize("kind", [AttentionBackend, KernelBackend])
def test_cross_attention(device: torch.device, kind: type) -> None:
    """Two contexts bring the encoder's K and V, and the generations read theirs, which are cached."""
    keys: dict[str, Any] = {"kv_lens": [9, 4, 0, 0], "cached": [0, 5, 12, 6]}
    batch = Batch(device, [3, 5, 1, 1], num_contexts=2, **keys)
    decoder = Batch(device, [3, 5, 1, 1], [0, 0, 4, 6], 2).metadata
    cross = decoder.create_cross_metadata(keys["kv_lens"], batch.manager, keys["cached"])
    cross.prepare()
    layer = batch.backend(kind=kind)
    k, v = batch.new_keys()
    close_to(layer.forward(batch.q[0], k, v, cross), batch.expected(causal=False))
    for given in ({"cross_kv": torch.cat((k, v), 1)}, {}):
        found = layer.forward(
            batch.q[0], None, None, cross, attention_mask="full", update_kv_cache=bool(given), **given
        )
        close_to(found, batch.expected(causal=False))
    with pytest.raises(ValueError, match="window"):
        layer.forward(batch.q[0], k, v, cross, attention_window_size=4)
    with pytest.raises(ValueError, match="create_cross_metadata"):
        layer.forward(batch.q[0], None, None, decoder_prepared(decoder), cross_kv=torch.cat((k, v), 1))

    # A step later all are generations, and nothing is new.
    decoder.cross = cross
    decoder.seq_lens, decoder.num_contexts = torch.ones(4, dtype=torch.int32), 0
    decoder.update_cross_metadata([0] * 4, batch.manager, batch.lengths)
    cross.prepare()
    batch.q_lens, batch.q = [1] * 4, [batch.q[0][:4]]
    close_to(layer.forward(batch.q[0], None, None, cross), batch.expected(causal=False))


def decoder_prepared(metadata: AttentionMetadata) -> AttentionMetadata:
    metadata.prepare()
    return metadata


def test_cross_attention_without_a_cache(device: torch.device) -> None:
    batch = Batch(device, [3, 5], [0, 0], 2, kv_lens=[9, 2])
    cross = Batch(device, [3, 5], [0, 0], 2).metadata.create_cross_metadata([9, 2])
    cross.prepare()
    found = batch.backend().forward(batch.q[0], *batch.new_keys(), cross)
    close_to(found, batch.expected(causal=False))


def test_any_cache_manager_will_do(device: torch.device) -> None:
    batch = Batch(device, **MIXED)
    batch.metadata.kv_cache_manager = ForeignManager(batch)
    batch.metadata.prepare()
    close_to(batch.backend().forward(batch.q[0], *batch.new_keys(), batch.metadata), batch.expected())
    blocks = batch.manager.get_batch_cache_indices(batch.requests)
    params = KVCacheParams(True, batch.cached, block_ids_per_seq=blocks)
    batch.metadata.request_ids, batch.metadata.kv_cache_params = None, params
    batch.metadata.prepare()
    close_to(batch.backend().forward(batch.q[0], *batch.new_keys(), batch.metadata), batch.expected())
    params.block_ids_per_seq = [one[:1] for one in blocks]
    batch.metadata.prepare()
    before = batch.metadata.buffers(0)[0].view(torch.int16).clone()
    with pytest.raises(ValueError, match="1 blocks of 8"):
        batch.backend().forward(batch.q[0], *batch.new_keys(), batch.metadata)
    assert torch.equal(batch.metadata.buffers(0)[0].view(torch.int16), before)


class WrappedManager:
    """A manager of the newer form behind a method that passes on what it gets."""

    def __init__(self, batch: Batch) -> None:
        self._manager = batch.manager

    def get_buffers(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._manager.get_buffers(*args, **kwargs)

    def get_batch_cache_indices(self, request_ids: list[int]) -> list[list[int]]:
        return self._manager.get_batch_cache_indices(request_ids)


class CarelessManager(ForeignManager):
    """A manager of the older form whose method takes any keyword and reads none."""

    def get_buffers(self, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        return self._buffer


@each_pair(
    num_kv_heads=[1, 2, 4, 8],
    kv_layout=["HND", "NHD"],
    kind=[ForeignManager, WrappedManager, CarelessManager],
)
def test_blocks_of_as_many_tokens_as_heads(
    num_kv_heads: int, kv_layout: str, kind: type, device: torch.device
) -> None:
    """The shape says nothing then: a manager that knows no layouts is NHD, whatever the metadata says."""
    for tokens_per_block in (num_kv_heads, 2 * num_kv_heads):
        batch = Batch(
            device, **MIXED, num_kv_heads=num_kv_heads, num_heads=8, tokens_per_block=tokens_per_block
        )
        batch.metadata.kv_cache_manager = kind(batch)
        batch.metadata.kv_layout = kv_layout
        batch.metadata.prepare()
        close_to(batch.backend().forward(batch.q[0], *batch.new_keys(), batch.metadata), batch.expected())


def test_draft_tokens(device: torch.device) -> None:
    batch = Batch(device, [4, 3, 2], [0, 9, 5], 1)
    batch.metadata.runtime_features = AttentionRuntimeFeatures(has_speculative_draft_tokens=True)
    batch.metadata.prepare()
    close_to(batch.backend().forward(batch.q[0], *batch.new_keys(), batch.metadata), batch.expected())


@pytest.mark.parametrize("kind", [AttentionBackend, KernelBackend])
def test_a_static_batch_is_padded(device: torch.device, kind: type) -> None:
    batch = Batch(device, [2, 3, 1], [4, 9, 5], 0)
    static = batch.metadata.create_cuda_graph_metadata(3, max_draft_tokens=2)
    static.seq_lens = torch.tensor([2, 3, 1], dtype=torch.int32)
    static.prepare()
    k, v = batch.new_keys()
    q, k, v = (torch.nn.functional.pad(one, (0, 0, 0, 3), value=float("nan")) for one in (batch.q[0], k, v))
    found = batch.backend(kind=kind).forward(q, k, v, static)
    close_to(found[:6], batch.expected())
    assert not found[6:].any()
    encoder = batch.metadata.create_cuda_graph_metadata(3, encode_only=True)
    encoder.seq_lens, encoder.num_contexts = torch.tensor([2, 3, 1], dtype=torch.int32), 3
    encoder.prepare()
    found = batch.backend(kind=kind).forward(q, k, v, encoder)
    close_to(found[:6], batch.expected())


def upstream_scenario(
    device: torch.device, *, is_mixed: bool, kv_len: int, causal: bool, small: bool, cache_dtype: torch.dtype
) -> None:
    """64 heads, 16 K/V heads of 128, 4 blocks of 256, 32 queries, batch 7; mixed: 5 of them generations."""
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16} if small else {}
    page, queries = (16, 6) if small else (256, 32)
    heads: dict[str, Any] = sizes or {"num_heads": 64, "num_kv_heads": 16, "head_dim": 128}
    contexts, whole = (2, 4 * page) if is_mixed else (7, 4 * page)
    new = kv_len or queries
    q_lens = [queries] * contexts + [1] * (7 - contexts)
    kv_lens = [new] * contexts + [0 if kv_len else 1] * (7 - contexts)
    batch = Batch(
        device,
        q_lens,
        [whole - one for one in kv_lens],
        contexts,
        kv_lens=kv_lens if kv_len else None,
        num_layers=4 if is_mixed else 1,
        cache_dtype=cache_dtype,
        tokens_per_block=page,
        **heads,
    )
    batch.metadata.prompt_lens = batch.lengths
    batch.metadata.prepare()
    mask = "causal" if causal else "full"
    atol = 5e-2 if cache_dtype == FP8 else 1e-2
    for layer_idx in range(len(batch.q)):
        k, v = batch.new_keys(layer_idx)
        found = batch.backend(layer_idx).forward(
            batch.q[layer_idx], k, v, batch.metadata, attention_mask=mask
        )
        close_to(found, batch.expected(layer_idx, causal=causal), atol=atol, rtol=1e-3)


SCENARIOS = [(False, 0, True), (False, 0, False), (False, 32, False), (False, 64, False)]
SCENARIOS += [(True, 0, True), (True, 64, False)]


@pytest.mark.parametrize(("is_mixed", "kv_len", "causal"), SCENARIOS)
@pytest.mark.parametrize("cache_dtype", [torch.float16, *slow(FP8)], ids=str)
def test_upstreams_scenarios_in_small(
    device: torch.device, is_mixed: bool, kv_len: int, causal: bool, cache_dtype: torch.dtype
) -> None:
    upstream_scenario(
        device, is_mixed=is_mixed, kv_len=kv_len // 8, causal=causal, small=True, cache_dtype=cache_dtype
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("is_mixed", "kv_len", "causal"), SCENARIOS)
@pytest.mark.parametrize("cache_dtype", [torch.float16, FP8], ids=str)
def test_upstreams_scenarios(
    device: torch.device, is_mixed: bool, kv_len: int, causal: bool, cache_dtype: torch.dtype
) -> None:
    upstream_scenario(
        device, is_mixed=is_mixed, kv_len=kv_len, causal=causal, small=False, cache_dtype=cache_dtype
    )


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("cache_dtype", [torch.float16, FP8], ids=str)
def test_a_graph_follows_lengths_and_blocks(
    device: torch.device, drafts: int, cache_dtype: torch.dtype
) -> None:
    """Captured on one batch and replayed on others, whose lengths, blocks and queries differ."""
    batch = Batch(device, [1 + drafts] * 3, [4, 9, 5], 0, num_layers=2, cache_dtype=cache_dtype, on_grid=True)
    static = batch.metadata.create_cuda_graph_metadata(3, max_draft_tokens=drafts)
    static.seq_lens = torch.tensor(batch.q_lens, dtype=torch.int32)
    static.prepare()
    layers = [batch.backend(layer_idx) for layer_idx in range(2)]
    inputs = [(batch.q[layer_idx].clone(), *batch.new_keys(layer_idx)) for layer_idx in range(2)]

    def step() -> list[torch.Tensor]:
        return [layer.forward(*three, static) for layer, three in zip(layers, inputs, strict=True)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    pointers = static.seq_lens_cuda.data_ptr(), static.step.lengths.data_ptr(), static.step.blocks.data_ptr()

    for q_lens, cached in (
        ([1 + drafts] * 3, [4, 9, 5]),
        ([1, 1 + drafts, 1], [33, 2, 17]),
        ([1 + drafts, 1, 1], [8, 24, 1]),
    ):
        other = Batch(device, q_lens, cached, 0, num_layers=2, cache_dtype=cache_dtype, on_grid=True)
        batch.manager.shutdown()
        batch.manager.add_dummy_requests(batch.requests[::-1], other.lengths[::-1])
        blocks = batch.manager.get_batch_cache_indices(batch.requests)
        theirs = other.manager.get_batch_cache_indices(other.requests)
        for layer_idx in range(2):
            ours = batch.manager.get_buffers(layer_idx)
            for own, one in zip(blocks, theirs, strict=True):
                ours[own] = other.manager.get_buffers(layer_idx)[one]
            new = (other.q[layer_idx], *other.new_keys(layer_idx))
            for held, tensor in zip(inputs[layer_idx], new, strict=True):
                held[: len(tensor)] = tensor
        static.seq_lens = torch.tensor(q_lens, dtype=torch.int32)
        static.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=cached)
        static.prepare()
        graph.replay()
        tolerance = {"atol": 5e-2, "rtol": 1e-2} if cache_dtype == FP8 else HALF
        for layer_idx, out in enumerate(outs):
            close_to(out[: sum(q_lens)], other.expected(layer_idx), **tolerance)
        found = static.seq_lens_cuda.data_ptr(), static.step.lengths.data_ptr(), static.step.blocks.data_ptr()
        assert found == pointers
