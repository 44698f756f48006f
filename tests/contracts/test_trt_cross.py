"""Cross attention through TensorRT-LLM's contract over many steps: an encoder's K and V, which are cached when
they come and read from then on, by contexts, generations and beams."""

from typing import Any

import pytest
import torch

from lightkv.contracts.tensorrt_llm import (
    AttentionBackend,
    AttentionMetadata,
    CacheType,
    KVCacheManager,
    KVCacheParams,
)
from tests.support.combinations import slow
from tests.support.contracts.trt_batch import KernelBackend, close_to

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = {4: 9, 5: 4, 6: 17, 7: 1}  # requests, and their encoders' tokens


class Decoder:
    """A decoder's metadata with those of its cross attention, and the encoders' K and V, float64 `[length,
    KV_HEADS, DIM]` each by request."""

    def __init__(
        self,
        device: torch.device,
        kind: type[AttentionBackend] = AttentionBackend,
        cache_dtype: torch.dtype = torch.float16,
        max_beam_width: int = 1,
        **blocks: Any,
    ) -> None:
        torch.manual_seed(2)
        self.device, self.int8 = device, cache_dtype == torch.int8
        settings: dict[str, Any] = {"tokens_per_block": 8, "max_seq_len": 32, **blocks}
        shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": DIM, "device": device}
        self.own = KVCacheManager(
            max_batch_size=4, max_beam_width=max_beam_width, tokens_per_block=8, max_seq_len=64, **shape
        )
        self.encoded = KVCacheManager(max_batch_size=4, dtype=cache_dtype, **settings, **shape)
        self.encoded.get_buffers(0)[1:] = 77 if self.int8 else float("nan")
        if self.int8:
            self.encoded.set_kv_scale(0, 0.04)
        for request, length in LENGTHS.items():
            self.own.add_sequence(request, 20, max_beam_width)
            self.encoded.add_sequence(request, length)
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.layer = kind(0, HEADS, DIM, KV_HEADS)
        self.metadata = AttentionMetadata(
            max_num_requests=4, max_num_sequences=16, max_num_tokens=64, kv_cache_manager=self.own
        )
        self.cached: dict[int, int] = dict.fromkeys(LENGTHS, 0)

    def encode(self, request: int) -> list[torch.Tensor]:
        """An encoder's K and V, `[length, KV_HEADS * DIM]` in 16 bits, which are attended to from now on."""
        made = [torch.randn(LENGTHS[request], KV_HEADS * DIM, device=self.device) for _ in "kv"]
        if self.int8:
            made = [(one / 0.04).round().clamp(-127, 127) * 0.04 for one in made]
        halves = [one.half() for one in made]
        self.keys[request] = [one.double().unflatten(1, (KV_HEADS, DIM)) for one in halves]
        return halves

    def load(
        self, metadata: AttentionMetadata, requests: list[int], seq_lens: list[int], num_contexts: int
    ) -> None:
        """Sets the decoder's batch; in beam search `metadata.beam_width` is set before."""
        metadata.request_ids = requests
        metadata.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        metadata.num_contexts = num_contexts
        metadata.kv_cache_params = KVCacheParams(True, [self.cached[r] for r in self.of_sequences(metadata)])

    def of_sequences(self, metadata: AttentionMetadata) -> list[int]:
        """The request of each sequence."""
        assert metadata.request_ids is not None
        width = metadata.num_generations // max(len(metadata.request_ids) - metadata.num_contexts, 1)
        counts = [1 if at < metadata.num_contexts else width for at in range(len(metadata.request_ids))]
        return [r for r, count in zip(metadata.request_ids, counts, strict=True) for _ in range(count)]

    def forward(
        self,
        metadata: AttentionMetadata,
        cross: AttentionMetadata,
        new: dict[int, list[torch.Tensor]],
        **form: Any,
    ) -> None:
        """Runs a step of cross attention and compares it; `new` are the encoders' K and V that it brings."""
        sequences = self.of_sequences(metadata)
        counts = metadata.seq_lens.tolist()
        q = torch.randn(sum(counts), HEADS * DIM, device=self.device).half()
        k, v = [
            torch.cat([new[r][side] for r in sequences if r in new]) if new else None for side in range(2)
        ]
        given: dict[str, Any] = {}
        if form and k is not None and v is not None:
            given, k, v = {"cross_kv": torch.cat((k, v), 1)}, None, None
        out = self.layer.forward(q, k, v, cross, **given)
        wanted = []
        for request, part in zip(sequences, q.split(counts), strict=True):
            heads = part.double().unflatten(1, (HEADS, DIM)).transpose(0, 1)
            keys, values = (one.transpose(0, 1) for one in self.keys[request])
            attended = torch.nn.functional.scaled_dot_product_attention(heads, keys, values, enable_gqa=True)
            wanted.append(attended.transpose(0, 1).flatten(1))
        limit = 1e-2 if self.int8 else 2e-3
        close_to(out, torch.cat(wanted), atol=limit, rtol=limit)


def run_steps(decoder: Decoder, **form: Any) -> None:
    """Contexts that bring their encoder's K and V, beside generations and a context's second chunk that read
    theirs."""
    held: set[int] = set()
    cross = None
    for requests, seq_lens, num_contexts in (
        ([4, 5], [3, 5], 2),
        ([6, 4, 5], [4, 1, 1], 1),
        ([6, 7, 5, 4], [2, 6, 1, 1], 2),  # the second chunk of request 6
        ([7, 6, 5, 4], [1, 1, 1, 1], 0),
        ([4, 7], [1, 1], 0),
    ):
        new = {request: decoder.encode(request) for request in requests if request not in held}
        brought = [LENGTHS[request] if request in new else 0 for request in requests]
        kept = [LENGTHS[request] if request in held else 0 for request in requests]
        decoder.load(decoder.metadata, requests, seq_lens, num_contexts)
        if cross is None:
            cross = decoder.metadata.create_cross_metadata(brought, decoder.encoded, kept)
            decoder.metadata.cross = cross
        else:
            assert decoder.metadata.update_cross_metadata(brought, decoder.encoded, kept) is cross
        assert cross.num_tokens == sum(brought)
        cross.prepare()
        decoder.forward(decoder.metadata, cross, new, **form)
        held |= set(requests)


BLOCKS = [
    {"tokens_per_block": 8},
    {"tokens_per_block": None, "cache_type": CacheType.PER_TOKEN},
    {"tokens_per_block": 8, "kv_layout": "NHD"},
    {"tokens_per_block": 6},
    {"tokens_per_block": None, "cache_type": CacheType.LINEAR},
]


@pytest.mark.parametrize("blocks", [*BLOCKS[:2], *slow(*BLOCKS[2:])], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("form", [{}, {"cross_kv": True}], ids=str)
def test_an_encoders_keys_are_written_once_and_read_at_every_step(
    device: torch.device, blocks: dict[str, Any], cache_dtype: torch.dtype, form: dict[str, bool]
) -> None:
    run_steps(Decoder(device, cache_dtype=cache_dtype, **blocks), **form)


@pytest.mark.slow
def test_the_kernels_do_so_too(device: torch.device) -> None:
    run_steps(Decoder(device, KernelBackend))


def generations(decoder: Decoder, width: int, drafts: int = 0) -> tuple[AttentionMetadata, AttentionMetadata]:
    """Metadata of a CUDA graph whose requests' encoders are cached, and those of its cross attention."""
    requests = list(LENGTHS)
    new = {request: decoder.encode(request) for request in requests}
    decoder.load(decoder.metadata, requests, [2, 1, 3, 1], 4)
    cross = decoder.metadata.create_cross_metadata(list(LENGTHS.values()), decoder.encoded)
    cross.prepare()
    decoder.forward(decoder.metadata, cross, new)
    decoder.metadata.cross = cross
    static = decoder.metadata.create_cuda_graph_metadata(4 * width, max_draft_tokens=drafts)
    assert static.cross is not None
    return static, static.cross


def next_step(decoder: Decoder, static: AttentionMetadata, requests: list[int], seq_lens: list[int]) -> None:
    decoder.load(static, requests, seq_lens, 0)
    static.update_cross_metadata(
        [0] * len(seq_lens), decoder.encoded, [LENGTHS[r] for r in decoder.of_sequences(static)]
    )
    assert static.cross is not None
    static.cross.prepare()


@pytest.mark.parametrize(("width", "drafts"), [(1, 0), (1, 2), (3, 0)])
def test_a_static_batch_reads_what_is_cached(device: torch.device, width: int, drafts: int) -> None:
    decoder = Decoder(device, max_beam_width=width)
    static, cross = generations(decoder, width, drafts)
    static.beam_width = width
    seen = set()
    for requests, first in (([4, 5, 6, 7], 1), ([6, 7, 4, 5], 1 + drafts), ([7, 6, 5, 4], 1)):
        next_step(decoder, static, requests, [first] + [1] * (4 * width - 1))
        tensors = cross.seq_lens_kv_cuda, cross.step.lengths, cross.step.blocks, cross.seq_lens_cuda
        seen.add(tuple(one.data_ptr() for one in tensors))
        assert cross.seq_lens_cuda is static.seq_lens_cuda
        decoder.forward(static, cross, {})
    assert len(seen) == 1


def test_beams_read_the_encoder_of_their_request(device: torch.device) -> None:
    """Beside the context of another request, without a table of beams, which is the decoder's own."""
    decoder = Decoder(device, max_beam_width=3)
    decoder.load(decoder.metadata, [4, 5], [3, 5], 2)
    new = {request: decoder.encode(request) for request in (4, 5)}
    cross = decoder.metadata.create_cross_metadata([9, 4], decoder.encoded)
    cross.prepare()
    decoder.forward(decoder.metadata, cross, new)
    decoder.metadata.cross, decoder.metadata.beam_width = cross, 3
    new = {6: decoder.encode(6)}
    decoder.load(decoder.metadata, [6, 4, 5], [4, *[1] * 6], 1)
    decoder.metadata.update_cross_metadata([17, *[0] * 6], decoder.encoded, [0, *[9] * 3, *[4] * 3])
    cross.prepare()
    decoder.forward(decoder.metadata, cross, new)
    with pytest.raises(ValueError, match="cache_indirection is not set"):
        decoder.metadata.prepare()


def test_numbers_that_do_not_fit_change_nothing(device: torch.device) -> None:
    decoder = Decoder(device)
    decoder.load(decoder.metadata, [4, 5], [3, 5], 2)
    cross = decoder.metadata.create_cross_metadata([9, 4], decoder.encoded)
    decoder.metadata.cross = cross
    cross.prepare()
    before = decoder.encoded.get_buffers(0).view(torch.int16).clone()
    for numbers in (([9], None), ([9, 4, 1], None), ([9, 4], [0]), ([], [])):
        for method in (decoder.metadata.update_cross_metadata, decoder.metadata.create_cross_metadata):
            with pytest.raises(ValueError, match="in a batch of 2 sequences: give one each"):
                method(numbers[0], decoder.own, numbers[1])
    assert cross.kv_cache_manager is decoder.encoded
    k, v = (torch.cat(both) for both in zip(decoder.encode(4), decoder.encode(5), strict=True))
    q = torch.randn(8, HEADS * DIM, device=device).half()
    for wrong in ((k[:-1], v[:-1]), (k, v[:-1]), (k[:, :-1], v)):
        with pytest.raises(ValueError, match="must be"):
            decoder.layer.forward(q, *wrong, cross)
    with pytest.raises(ValueError, match="13 new keys, and neither q nor k holds them"):
        decoder.layer.forward(q, None, None, cross)
    with pytest.raises(ValueError, match="q holds K and V already"):
        decoder.layer.forward(torch.cat((q, q), 1), None, None, cross)
    assert torch.equal(decoder.encoded.get_buffers(0).view(torch.int16), before)
    cross.step  # noqa: B018  # it is still prepared
    for lens, cached, words in (
        ([9, 40], None, "40 tokens with this step's"),
        ([9, -1], None, "seq_lens_kv"),
        ([9, 4], [0, -3], r"num_cached_tokens_per_seq is \[0, -3\]"),
    ):
        decoder.metadata.update_cross_metadata(lens, decoder.encoded, cached)
        with pytest.raises(ValueError, match=words):
            cross.prepare()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8], ids=str)
def test_a_graph_reads_what_is_cached(device: torch.device, width: int, cache_dtype: torch.dtype) -> None:
    """Captured on one batch, and replayed for others in another order of requests."""
    decoder = Decoder(device, cache_dtype=cache_dtype, max_beam_width=width)
    static, cross = generations(decoder, width)
    static.beam_width = width
    next_step(decoder, static, [4, 5, 6, 7], [1] * (4 * width))
    q = torch.zeros(4 * width, HEADS * DIM, device=device, dtype=torch.float16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decoder.layer.forward(q, None, None, cross)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder.layer.forward(q, None, None, cross)

    class Replayed(AttentionBackend):
        def forward(self, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            q.copy_(given)
            graph.replay()
            return out

    decoder.layer = Replayed(0, HEADS, DIM, KV_HEADS)
    for requests in ([4, 5, 6, 7], [7, 4, 6, 5], [5, 6, 7, 4]):
        next_step(decoder, static, requests, [1] * (4 * width))
        decoder.forward(static, cross, {})
