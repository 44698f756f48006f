"""Beam search through TensorRT-LLM's contract: a table of beams (`cache_indirection`) over blocks that never
move, compared with caches that are reordered by hand."""

from collections.abc import Sequence
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
from lightkv.contracts.tensorrt_llm.beams import Beams
from tests.support.combinations import slow
from tests.support.contracts.trt_batch import KernelBackend, close_to

HEADS, KV_HEADS, DIM = 4, 2, 16
MOST = 40  # tokens of a sequence


class Search:
    """Beam search of several requests: their blocks, their table of beams, and a dense copy of each beam's K
    and V, float64 `[length, KV_HEADS, dim]`, which a step reorders.

    The first step has one sequence for each request, its prompt; later ones have one for each beam. The table
    has nonsense where TensorRT-LLM's kernels do not read it: in the prompt, and from the newest token on.
    """

    def __init__(
        self,
        device: torch.device,
        widths: Sequence[int],
        prompts: Sequence[int],
        kind: type[AttentionBackend] = AttentionBackend,
        dtype: torch.dtype = torch.float16,
        cache_dtype: torch.dtype | None = None,
        dim: int = DIM,
        **changes: Any,
    ) -> None:
        torch.manual_seed(1)
        self.dim = dim
        self.device, self.dtype, self.widths, self.prompts = device, dtype, list(widths), list(prompts)
        self.requests = [7 + number for number in range(len(widths))]
        settings: dict[str, Any] = {"tokens_per_block": 16, "max_seq_len": MOST}
        self.manager = KVCacheManager(
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=dim,
            max_batch_size=len(widths),
            max_beam_width=max(widths),
            dtype=cache_dtype or dtype,
            device=device,
            **{**settings, **changes},
        )
        self.int8 = cache_dtype == torch.int8
        for request, width, prompt in zip(self.requests, widths, prompts, strict=True):
            self.manager.add_sequence(request, prompt, width)
        if self.int8:
            self.manager.set_kv_scale(0, 0.04)
        self.manager.get_buffers(0)[1:] = 77 if self.int8 else float("nan")
        self.layer = kind(0, HEADS, dim, KV_HEADS)
        self.held: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in widths]
        shape = len(widths) + 1, max(widths) + 1, MOST
        self.table = torch.full(shape, max(widths) - 1, dtype=torch.int32, device=device)
        self.metadata = AttentionMetadata(
            max_num_requests=len(widths),
            max_num_sequences=sum(widths),
            max_num_tokens=512,
            kv_cache_manager=self.manager,
            cache_indirection=self.table,
        )

    def draw(self, count: int) -> list[torch.Tensor]:
        """q, k and v of some tokens."""
        made = [
            torch.randn(count, heads * self.dim, device=self.device) for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        if self.int8:
            made[1:] = [(one / 0.04).round().clamp(-127, 127) * 0.04 for one in made[1:]]
        return [one.to(self.dtype) for one in made]

    def attend(self, q: torch.Tensor, held: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Causal attention of a sequence's last tokens in float64."""
        heads = q.double().view(len(q), HEADS, self.dim).transpose(0, 1)
        k, v = (one.transpose(0, 1) for one in held)
        seen = torch.ones(len(q), k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - len(q))
        out = torch.nn.functional.scaled_dot_product_attention(heads, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)

    def append(
        self, held: tuple[torch.Tensor, torch.Tensor] | None, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = [one.double().view(len(one), KV_HEADS, self.dim) for one in (k, v)]
        if held is None:
            return new[0], new[1]
        return torch.cat((held[0], new[0])), torch.cat((held[1], new[1]))

    def load(self, seq_lens: list[int], cached: list[int], num_contexts: int, metadata: Any = None) -> None:
        """Prepares the metadata for a step of the requests in their order, or of those in the context phase."""
        metadata = self.metadata if metadata is None else metadata
        metadata.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        metadata.num_contexts = num_contexts
        metadata.request_ids = self.requests
        is_context = num_contexts == len(seq_lens)
        metadata.beam_width = 1 if is_context else self.widths[num_contexts:]
        widths = [1] * len(seq_lens) if is_context else [1] * num_contexts + self.widths[num_contexts:]
        metadata.prompt_lens = [
            prompt for prompt, width in zip(self.prompts, widths, strict=True) for _ in range(width)
        ]
        metadata.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=cached)
        metadata.prepare()

    def prefill(self) -> None:
        """The prompts of all requests."""
        self.load(self.prompts, [0] * len(self.prompts), len(self.prompts))
        q, k, v = self.draw(sum(self.prompts))
        out = self.layer.forward(q, k, v, self.metadata)
        wanted = []
        for number, parts in enumerate(zip(*(one.split(self.prompts) for one in (q, k, v)), strict=True)):
            held = self.append(None, *parts[1:])
            self.held[number] = [held] * self.widths[number]
            wanted.append(self.attend(parts[0], held))
        close_to(out, torch.cat(wanted))

    def grow(self) -> list[int]:
        """Gives requests blocks for a token more, and returns the cached tokens of each beam."""
        lengths = [len(beams[0][0]) for beams in self.held]
        for request, length in zip(self.requests, lengths, strict=True):
            self.manager.resize(request, length + 1)
        return [length for length, width in zip(lengths, self.widths, strict=True) for _ in range(width)]

    def choose(self, parents: list[list[int]]) -> None:
        """What the sampler does: each beam goes on from a parent, in the table and in the dense copy."""
        old = self.table.clone()
        for number, chosen in enumerate(parents):
            prompt, length = self.prompts[number], len(self.held[number][0][0])
            if length > prompt:
                for beam, parent in enumerate(chosen):
                    self.table[number, beam, prompt:length] = old[number, parent, prompt:length]
                    self.table[number, beam, length - 1] = parent
            self.held[number] = [self.held[number][parent] for parent in chosen]

    def wanted(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The attention of a token of each beam, which is appended to the dense copies."""
        out, at = [], 0
        for beams in self.held:
            for beam, held in enumerate(beams):
                beams[beam] = self.append(held, k[at : at + 1], v[at : at + 1])
                out.append(self.attend(q[at : at + 1], beams[beam]))
                at += 1
        return torch.cat(out)

    def random_parents(self) -> list[list[int]]:
        return [torch.randint(width, (width,)).tolist() for width in self.widths]


BLOCKS = [
    {"tokens_per_block": None, "cache_type": CacheType.PER_TOKEN},
    {"tokens_per_block": 16},
    {"tokens_per_block": 16, "kv_layout": "NHD"},
    {"tokens_per_block": 6},  # no power of two
    {"tokens_per_block": 64, "max_seq_len": 64},
    {"tokens_per_block": None, "cache_type": CacheType.LINEAR},
]


@pytest.mark.parametrize("blocks", [*BLOCKS[:2], *slow(*BLOCKS[2:])], ids=str)
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("widths", [[3, 3], [2, 4, 1]], ids=str)
def test_beams_read_what_their_parents_wrote(
    device: torch.device, blocks: dict[str, Any], widths: list[int], is_static: bool
) -> None:
    search = Search(device, widths, [5, 17, 12][: len(widths)], **blocks)
    search.prefill()
    metadata = search.metadata
    if is_static:
        metadata = metadata.create_cuda_graph_metadata(sum(widths))
    held = set()
    for step in range(6):
        if step:
            search.choose(search.random_parents())
        search.load([1] * sum(widths), search.grow(), 0, metadata)
        q, k, v = search.draw(sum(widths))
        out = search.layer.forward(q, k, v, metadata)
        close_to(out, search.wanted(q, k, v))
        held.add(metadata.step.beam_rows.data_ptr())
    assert not is_static or len(held) == 1


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("tokens_per_block", [16, *slow(1, 64)])
def test_the_kernels_compute_the_same(
    device: torch.device, tokens_per_block: int, cache_dtype: torch.dtype | None
) -> None:
    search = Search(
        device, [3, 2], [5, 17], KernelBackend, cache_dtype=cache_dtype, tokens_per_block=tokens_per_block
    )
    limit = 2e-3 if cache_dtype is None else 1e-2
    search.layer = AttentionBackend(0, HEADS, DIM, KV_HEADS)  # the prompts are tested elsewhere
    search.prefill()
    search.layer = KernelBackend(0, HEADS, DIM, KV_HEADS)
    for _ in range(2):
        search.choose(search.random_parents())
        search.load([1] * 5, search.grow(), 0)
        q, k, v = search.draw(5)
        close_to(
            search.layer.forward(q, k, v, search.metadata), search.wanted(q, k, v), atol=limit, rtol=limit
        )


def test_a_window_over_keys_that_are_there(device: torch.device) -> None:
    search = Search(device, [3, 2], [5, 17])
    search.prefill()
    for _ in range(2):
        search.choose(search.random_parents())
        search.load([1] * 5, search.grow(), 0)
        q, k, v = search.draw(5)
        found = search.layer.forward(q, k, v, search.metadata)
        near = search.layer.forward(
            q, None, None, search.metadata, update_kv_cache=False, attention_window_size=4
        )
        wanted = search.wanted(q, k, v)
        close_to(found, wanted)
        last = [tuple(one[-4:] for one in held) for beams in search.held for held in beams]
        close_to(near, torch.cat([search.attend(q[at : at + 1], held) for at, held in enumerate(last)]))


@pytest.mark.parametrize(
    ("dim", "prompt", "tokens_per_block"), [(16, 9, 16), pytest.param(128, 300, 64, marks=pytest.mark.gpu)]
)
def test_a_prompt_beside_beams(device: torch.device, dim: int, prompt: int, tokens_per_block: int) -> None:
    """A context has one sequence, in front of the beams of the others."""
    blocks: dict[str, Any] = {"tokens_per_block": tokens_per_block, "max_seq_len": 2 * prompt}
    search = Search(device, [3, 2], [prompt, 6], dim=dim, **blocks)
    search.requests, search.prompts, search.widths = [8], [6], [2]
    held, search.held = search.held, [[]]
    search.prefill()
    search.held = [held[0], search.held[0]]
    search.requests, search.prompts, search.widths = [7, 8], [prompt, 6], [3, 2]
    search.manager.resize(8, 7)
    search.load([prompt, 1, 1], [0, 6, 6], 1)
    q, k, v = search.draw(prompt + 2)
    out = search.layer.forward(q, k, v, search.metadata)
    close_to(out[:prompt], search.attend(q[:prompt], search.append(None, k[:prompt], v[:prompt])))
    search.held[0] = []
    close_to(out[prompt:], search.wanted(q[prompt:], k[prompt:], v[prompt:]))


@pytest.mark.parametrize("tokens_per_block", [1, *slow(16)])
def test_greedy_beams_are_those_of_reordered_caches(device: torch.device, tokens_per_block: int) -> None:
    """A model of one layer: by the contract, and by caches that are copied, the best texts are the same."""
    torch.manual_seed(3)
    width, vocabulary = 4, 50
    embedding = torch.randn(vocabulary, HEADS * DIM, device=device)
    projection = torch.randn(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, device=device) / 8
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    search = Search(device, [width], [7], dtype=torch.float32, tokens_per_block=tokens_per_block)
    prompt = torch.randint(vocabulary, (7,), device=device)
    search.load([7], [0], 1)
    q, k, v = (embedding[prompt] @ projection).split(sizes, 1)
    out = search.layer.forward(q, k, v, search.metadata)
    search.held[0] = [search.append(None, k, v)] * width
    found = wanted = out[-1:].expand(width, -1)
    scores = torch.tensor([0.0, *[float("-inf")] * (width - 1)], device=device)
    texts: list[list[int]] = [[] for _ in range(width)]
    moved = False
    for _ in range(8):
        both = []
        for hidden in (found, wanted):
            all_scores = scores[:, None] + (hidden.float() @ embedding.T).log_softmax(1)
            both.append(all_scores.flatten().topk(width))
        assert torch.equal(both[0].indices, both[1].indices)
        scores = both[0].values
        parents = (both[0].indices // vocabulary).tolist()
        tokens = both[0].indices % vocabulary
        moved |= parents != list(range(width)) and bool(texts[0])
        texts = [[*texts[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)]
        search.choose([parents])
        search.load([1] * width, search.grow(), 0)
        q, k, v = (embedding[tokens] @ projection).split(sizes, 1)
        found = search.layer.forward(q, k, v, search.metadata)
        wanted = search.wanted(q, k, v).float()
    assert moved
    assert len({tuple(text) for text in texts}) == width


def prepared_search(device: torch.device) -> tuple[Search, list[int]]:
    """A search whose second step is prepared, and the cached tokens of its beams."""
    search = Search(device, [3, 2], [5, 17])
    search.prefill()
    search.load([1] * 5, search.grow(), 0)
    inputs = search.draw(5)
    search.layer.forward(*inputs, search.metadata)
    search.wanted(*inputs)
    search.choose([[2, 0, 1], [1, 0]])
    cached = search.grow()
    search.load([1] * 5, cached, 0)
    return search, cached


def rude(search: Search) -> dict[str, tuple[dict[str, Any], str]]:
    """Fields of metadata that do not fit, by a name, and what is said of them."""
    table = search.table
    wrong = {"int64": table.long(), "float": table.float(), "flat": table.flatten(1)}
    wrong |= {"two requests too few": table[:1], "a beam too few": table[:, :2], "short": table[:, :, :17]}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        name: ({"cache_indirection": one}, r"int32 \[(2 or more, 3 or more, 18|requests, beams, pos)")
        for name, one in wrong.items()
    }
    cases["none"] = {"cache_indirection": None}, r"\[3, 2\] beams, and cache_indirection is not set"
    cases["a list"] = {"cache_indirection": [[[0]]]}, r"got \[\[\[0\]\]\]"
    cases["an uneven number"] = {"beam_width": 2}, "beam_width is 2, and 5 of 5"
    cases["too many"] = {"beam_width": [3, 3]}, r"beam_width is \[3, 3\], and 5 of 5"
    cases["zero"] = {"beam_width": 0}, "beam_width is 0"
    cases["fractions"] = {"beam_width": [2.5, 2.5]}, r"beam_width is \[2.5, 2.5\]"
    cases["nothing"] = {"beam_width": None}, "beam_width is None"
    cases["negative"] = {"beam_width": [6, -1]}, r"beam_width is \[6, -1\]"
    cases["lengths that differ"] = (
        {"kv_cache_params": KVCacheParams(True, [6, 5, 6, 18, 18])},
        r"\[6, 5, 6, 18, 18\] cached ones: each has one",
    )
    cases["negative lengths"] = (
        {"kv_cache_params": KVCacheParams(True, [6, 6, 6, -1, -1])},
        r"num_cached_tokens_per_seq is \[6, 6, 6, -1, -1\]",
    )
    cases["drafts"] = (
        {"seq_lens": torch.tensor([1, 2, 1, 1, 1], dtype=torch.int32)},
        "each has one|the CUDA graph is of 5 sequences of one token each",
    )
    cases["prompts of requests"] = {"prompt_lens": [5, 17]}, r"prompt_lens \[5, 17\] in a batch of 5"
    cases["a request of other beams"] = (
        {"request_ids": [8, 7]},
        "3 beams of request 8, which was opened with 2",
    )
    cases["too few requests"] = {"request_ids": [7]}, r"request_ids \[7\] of 5 sequences"
    return cases


@pytest.mark.parametrize("is_static", [False, True])
def test_tables_that_do_not_fit_are_refused(device: torch.device, is_static: bool) -> None:
    search, cached = prepared_search(device)
    metadata = search.metadata.create_cuda_graph_metadata(5) if is_static else search.metadata
    search.load([1] * 5, cached, 0, metadata)
    rows, lengths = metadata.step.beam_rows.clone(), metadata.step.lengths.clone()
    for name, (changes, words) in rude(search).items():
        before = {key: getattr(metadata, key) for key in changes}
        for key, value in changes.items():
            setattr(metadata, key, value)
        with pytest.raises(ValueError, match=words):
            metadata.prepare()
        for key, value in before.items():
            setattr(metadata, key, value)
        if "seq_lens" in changes:  # another batch was set, so the one before is not prepared any more
            metadata.prepare()
        assert torch.equal(metadata.step.beam_rows, rows), name
        assert torch.equal(metadata.step.lengths, lengths), name
    q, k, v = search.draw(5)
    close_to(search.layer.forward(q, k, v, metadata), search.wanted(q, k, v))


def test_numbers_of_beams_that_there_are_not(device: torch.device) -> None:
    """The nearest beam of the same request is read."""
    search, _ = prepared_search(device)
    for wrong in (3, -1):
        search.table[1, 0, 17] = wrong
        search.metadata.prepare()
        rows = search.metadata.step.beam_rows
        assert int(rows[3, 17]) == (4 if wrong == 3 else 3)


def test_a_graph_of_beams_and_one_without(device: torch.device) -> None:
    search, cached = prepared_search(device)
    of_beams = search.metadata.create_cuda_graph_metadata(5)
    search.load([1] * 5, cached, 0, of_beams)
    pointer = of_beams.step.beam_rows.data_ptr()
    for metadata in (of_beams, search.metadata.create_cuda_graph_metadata(5)):
        metadata.beam_width, metadata.prompt_lens = 1, None
        metadata.request_ids, blocks = None, search.manager.block_table([7, 8], [3, 2])[0]
        metadata.kv_cache_params = KVCacheParams(True, cached, block_ids_per_seq=blocks.tolist())
        metadata.prepare()
    assert of_beams.step.beam_rows.data_ptr() == pointer
    assert (of_beams.step.beam_rows[:, :19] == torch.arange(5, device=device)[:, None]).all()
    assert metadata.step.beam_rows is None
    metadata.beam_width = [3, 2]
    with pytest.raises(ValueError, match="whose first batch had one beam"):
        metadata.prepare()
    longer = torch.zeros(2, 3, 100, dtype=torch.int32, device=device)
    of_beams.beam_width, of_beams.cache_indirection = [3, 2], longer
    of_beams.kv_cache_params = KVCacheParams(True, [6, 6, 6, 70, 70], block_ids_per_seq=[[1] * 9] * 5)
    with pytest.raises(ValueError, match="of 71 tokens in beam search, and the CUDA graph has room for 41"):
        of_beams.prepare()


@pytest.mark.parametrize("beam_width", [0, -1])
def test_a_width_that_is_none_is_refused_without_generations(beam_width: int) -> None:
    with pytest.raises(ValueError, match=f"beam_width is {beam_width}, and 0 of 2"):
        Beams.of(beam_width, num_contexts=2, num_sequences=2)
    assert Beams.of(3, num_contexts=2, num_sequences=2) is None


@pytest.mark.parametrize("beam_width", [1, [1, 1]], ids=str)
def test_one_beam_reads_no_table(device: torch.device, beam_width: Any) -> None:
    search = Search(device, [1, 1], [5, 17])
    search.prefill()
    search.metadata.cache_indirection = None
    search.load([1, 1], search.grow(), 0)
    search.metadata.beam_width = beam_width
    search.metadata.prepare()
    assert search.metadata.step.beam_rows is None
    q, k, v = search.draw(2)
    close_to(search.layer.forward(q, k, v, search.metadata), search.wanted(q, k, v))
    search.load(search.prompts, [0, 0], 2)
    search.metadata.beam_width = []
    search.metadata.prepare()


def test_a_manager_that_knows_no_beams(device: torch.device) -> None:
    search, cached = prepared_search(device)

    class Foreign:
        def get_buffers(self, layer_idx: int, kv_layout: str) -> torch.Tensor:
            return search.manager.get_buffers(layer_idx, kv_layout)

        def get_batch_cache_indices(self, request_ids: list[int]) -> list[list[int]]:
            return search.manager.get_batch_cache_indices(request_ids)

    search.metadata.kv_cache_manager = Foreign()
    with pytest.raises(ValueError, match=r"requests with \[3, 2\] beams.*block_ids_per_seq"):
        search.metadata.prepare()
    blocks = search.manager.block_table([7, 8], [3, 2])[0].tolist()
    search.metadata.kv_cache_params = KVCacheParams(True, cached, block_ids_per_seq=blocks)
    search.metadata.prepare()
    q, k, v = search.draw(5)
    close_to(search.layer.forward(q, k, v, search.metadata), search.wanted(q, k, v))


def test_beams_share_the_blocks_of_their_prompt(device: torch.device) -> None:
    search = Search(device, [4], [35])  # two full blocks of 16 and one for each beam
    manager = search.manager
    table, counts = manager.block_table([7], [4])
    assert counts == [3] * 4
    assert table[:, :2].unique().numel() == 2
    assert table[:, 2].unique().numel() == 4
    assert manager.get_num_free_blocks() == manager.blocks_in_primary_pool - 6
    assert manager.get_batch_cache_indices([7]) == [table[0].tolist()]
    with pytest.raises(ValueError, match="requests of 5 beams; this manager has 1 to 4"):
        manager.add_sequence(9, 3, 5)
    with pytest.raises(ValueError, match="5 beams of request 7, which was opened with 4"):
        manager.block_table([7], [5])
    manager.cache.check()
    manager.free_resources(7)
    manager.add_sequence(9, 3)
    assert manager.block_table([9], [3])[1] == [1] * 3  # of one beam: for all
    manager.shutdown()
    assert manager.get_num_free_blocks() == manager.blocks_in_primary_pool
    manager.cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_a_graph_follows_the_table(
    device: torch.device, blocks: dict[str, Any], cache_dtype: torch.dtype | None
) -> None:
    """Captured once, and replayed for steps in which beams change their parents and get blocks."""
    widths = [3, 2]
    search = Search(device, widths, [5, 17], cache_dtype=cache_dtype, **blocks)
    search.layer = AttentionBackend(0, HEADS, DIM, KV_HEADS)
    search.prefill()
    static = search.metadata.create_cuda_graph_metadata(5)
    inputs = search.draw(5)
    search.load([1] * 5, search.grow(), 0, static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        search.layer.forward(*inputs, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = search.layer.forward(*inputs, static)
    limit = 2e-3 if cache_dtype is None else 1e-2
    for step in range(8):
        if step:
            search.choose(search.random_parents())
        static.cache_indirection = search.table.clone()  # another tensor is copied
        search.load([1] * 5, search.grow(), 0, static)
        for held, new in zip(inputs, search.draw(5), strict=True):
            held.copy_(new)
        graph.replay()
        close_to(out, search.wanted(*inputs), atol=limit, rtol=limit)
