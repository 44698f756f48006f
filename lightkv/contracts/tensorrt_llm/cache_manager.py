"""TensorRT-LLM's cache manager over lightkv's memory: a ledger and a device table whose unit is a block."""

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import numpy as np
import torch

from lightkv.counts import checked_count
from lightkv.kv_cache import KVCache
from lightkv.ledger import Sequence as BlockSequence
from lightkv.memory.kv_spec import KVSpec
from lightkv.memory.staging import upload
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED

from .arguments import CacheType
from .page_views import FORMATS

# The ledger wants a prompt; blocks are never published, so no other request hits it.
_ANY_ID = (0,)


class KVCacheManager:
    """K and V of requests in blocks of `tokens_per_block` tokens: what `AttentionMetadata` takes as
    `kv_cache_manager`.

    Blocks are the tokens of a `KVCache` (`cache`), so its ledger counts them, its device table says which block
    is where, and nothing is read back for a step. Block 0 is padding, and belongs to no request.

    In beam search a request has blocks for each of its beams, at most `max_beam_width`. Those that the prompt
    fills belong to all of them, and hold what the first beam writes.

    `cache_type` PER_TOKEN has blocks of one token, and LINEAR one block of `max_seq_len` tokens for each
    request. `dtype` is that of K and V: float8_e4m3fn and int8 are stored with one scale for each layer, 1
    until `set_kv_scale`. `num_blocks`: None for as many as `max_batch_size` requests of `max_seq_len` tokens
    need, in each of `max_beam_width` beams.

    Raises ValueError and TypeError for numbers that are not positive integers or do not fit each other, and
    OutOfMemory.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        max_batch_size: int,
        max_beam_width: int = 1,
        tokens_per_block: int | None = None,
        num_blocks: int | None = None,
        dtype: torch.dtype = torch.float16,
        kv_layout: Literal["NHD", "HND"] = "HND",
        cache_type: CacheType = CacheType.PAGED,
        device: torch.device | str = "cpu",
    ) -> None:
        implied = {CacheType.LINEAR: max_seq_len, CacheType.PER_TOKEN: 1}.get(cache_type)
        if implied is not None and tokens_per_block not in (None, implied):
            raise ValueError(
                f"tokens_per_block is {tokens_per_block}, and blocks of a {cache_type.name} cache have "
                f"{implied}; leave it out, or choose CacheType.PAGED"
            )
        if implied is None and tokens_per_block is None:
            raise ValueError("a PAGED cache needs tokens_per_block")
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout is {kv_layout!r}; choose NHD or HND")
        self.num_layers = checked_count("num_layers", num_layers)
        self.num_kv_heads = checked_count("num_kv_heads", num_kv_heads)
        self.head_dim = checked_count("head_dim", head_dim)
        self.max_seq_len = checked_count("max_seq_len", max_seq_len)
        self.max_batch_size = checked_count("max_batch_size", max_batch_size)
        self.max_beam_width = checked_count("max_beam_width", max_beam_width)
        self.tokens_per_block = checked_count("tokens_per_block", implied or tokens_per_block or 0)
        self.max_blocks_per_seq = -(-self.max_seq_len // self.tokens_per_block)
        self.dtype = dtype
        self.kv_layout = kv_layout
        self.cache_type = cache_type
        width = self.num_kv_heads * self.tokens_per_block * self.head_dim
        of_dtype = FORMATS.get(dtype, AS_COMPUTED)
        computed = torch.bfloat16 if of_dtype.is_quantised else dtype
        spec = KVSpec(self.num_layers, 1, width, width, computed, of_dtype)
        most_beams = self.max_batch_size * self.max_beam_width
        capacity = most_beams * self.max_blocks_per_seq if num_blocks is None else num_blocks
        self.cache = KVCache(spec, capacity, most_beams, self.max_blocks_per_seq, device)
        self._sequences: dict[int, list[BlockSequence]] = {}  # of each request one for each of its beams
        self._lists: dict[int, list[int]] = {}  # blocks of requests, as far as the host was asked for them
        if of_dtype.is_static:
            for layer_idx in range(self.num_layers):
                self.set_kv_scale(layer_idx, 1.0)

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.cache.memory.device

    @property
    def blocks_in_primary_pool(self) -> int:
        """Blocks that requests can hold."""
        return self.cache.capacity

    def get_num_free_blocks(self) -> int:
        """Returns how many blocks no request holds."""
        return self.cache.num_available

    def set_kv_scale(self, layer_idx: int, scale: float | torch.Tensor) -> None:
        """Sets what a layer's stored 8-bit numbers are multiplied by to give K and V. Raises ValueError for a
        cache that is not of 8 bits, and a scale that is not finite and positive."""
        one = torch.as_tensor(scale, dtype=torch.float32, device=self.device).reshape(1)
        self.cache.memory.pool.set_static_scales(layer_idx, one, one)

    def kv_scale(self, layer_idx: int) -> torch.Tensor | None:
        """Returns the scales of a layer's K and V, float32 `[2]`; None if it is not of 8 bits."""
        scales = self.cache.memory.pool.scales(layer_idx)
        return None if scales is None else scales[0, 0]

    def get_buffers(self, layer_idx: int, kv_layout: str | None = None) -> torch.Tensor:
        """Returns the blocks of a layer, `[1 + blocks, 2, num_kv_heads, tokens_per_block, head_dim]` for HND
        and `[1 + blocks, 2, tokens_per_block, num_kv_heads, head_dim]` for NHD, a view. `kv_layout`: None for
        the manager's own, in which it is contiguous."""
        rows = self.cache.memory.pool.kv(layer_idx).view(self.dtype)
        if self.kv_layout == "HND":
            found = rows.view(-1, 2, self.num_kv_heads, self.tokens_per_block, self.head_dim)
        else:
            found = rows.view(-1, 2, self.tokens_per_block, self.num_kv_heads, self.head_dim)
        return found if kv_layout in (None, self.kv_layout) else found.transpose(2, 3)

    def add_dummy_requests(
        self, request_ids: Sequence[int], token_nums: Sequence[int] | None = None, max_beam_width: int = 1
    ) -> None:
        """Opens requests of `max_beam_width` beams with blocks for `token_nums` tokens each (None: for one),
        all or none. The beams share the blocks that these tokens fill, so they have to be the prompt's.

        Raises ValueError for a request that is open, and for more beams than the manager's; OutOfTokens,
        OutOfRows and SequenceTooLong, which count blocks.
        """
        nums = [1] * len(request_ids) if token_nums is None else list(token_nums)
        known = [request for request in request_ids if request in self._sequences]
        if known or len(nums) != len(request_ids) or len(set(request_ids)) != len(request_ids):
            raise ValueError(
                f"requests {list(request_ids)} with {len(nums)} numbers of tokens, of which {known} are "
                "open: give each once, with its number, and free_resources first"
            )
        if not 1 <= max_beam_width <= self.max_beam_width:
            raise ValueError(
                f"requests of {max_beam_width} beams; this manager has 1 to {self.max_beam_width} for each: "
                "make it with a max_beam_width of as many"
            )
        counts = [self._num_blocks(num) for num in nums]
        shared = [num // self.tokens_per_block if max_beam_width > 1 else 0 for num in nums]
        opened: list[list[BlockSequence]] = []
        try:
            for count in shared:
                opened.append([self.cache.open(_ANY_ID)])
                if count:
                    self.cache.extend(opened[-1], [count])
                for _ in range(1, max_beam_width):
                    opened[-1].append(self.cache.fork(opened[-1][0]))
            own = [count - filled for count, filled in zip(counts, shared, strict=True)]
            wanting = [
                (beam, count) for beams, count in zip(opened, own, strict=True) for beam in beams if count
            ]
            if wanting:
                self.cache.extend([beam for beam, _ in wanting], [count for _, count in wanting])
        except BaseException:
            for beam in chain.from_iterable(opened):
                self.cache.close(beam, cache=False)
            raise
        self._sequences.update(zip(request_ids, opened, strict=True))

    def add_sequence(self, request_id: int, num_tokens: int, beam_width: int = 1) -> None:
        """Opens one request with blocks for `num_tokens` tokens, as `add_dummy_requests`."""
        self.add_dummy_requests([request_id], [num_tokens], beam_width)

    def resize(self, request_id: int, num_tokens: int) -> None:
        """Gives each beam of a request the blocks that `num_tokens` tokens need, and takes no block from it.
        Raises as `add_dummy_requests`, with nothing changed, and KeyError for a request that is not open."""
        beams = self._sequences[request_id]
        missing = self._num_blocks(num_tokens) - beams[0].length
        if missing > 0:
            self.cache.extend(beams, [missing] * len(beams))
            self._lists.pop(request_id, None)

    def free_resources(self, request_id: int) -> None:
        """Closes a request and frees its blocks. Raises KeyError for a request that is not open."""
        for beam in self._sequences.pop(request_id):
            self.cache.close(beam, cache=False)
        self._lists.pop(request_id, None)

    def shutdown(self) -> None:
        """Closes all requests."""
        for request_id in list(self._sequences):
            self.free_resources(request_id)

    def get_batch_cache_indices(
        self, request_ids: Sequence[int], layer_idx: int | None = None
    ) -> list[list[int]]:
        """Returns the blocks of each request's first beam, the same in every layer: one, where the cache is
        linear, and one for each token, where it is per token. Waits for the device if a request has got blocks
        since it was asked for last. Raises KeyError for a request that is not open."""
        asked = [request for request in request_ids if request not in self._lists]
        if asked:
            sequences = [self._sequences[request][0] for request in asked]
            found = torch.cat([self.cache.slots(sequence) for sequence in sequences]).tolist()
            for request, sequence in zip(asked, sequences, strict=True):
                self._lists[request], found = found[: sequence.length], found[sequence.length :]
        return [list(self._lists[request]) for request in request_ids]

    def block_table(
        self, request_ids: Sequence[int], beam_widths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Returns the blocks of each request, int32 `[requests, longest]` on the device, and how many it has;
        numbers after those are of no meaning. `beam_widths`: for how many beams of each request; the blocks of
        a request with one beam are for all. None for the first of each. Waits for nothing. Raises KeyError, and
        ValueError for more beams than a request has."""
        sequences: list[BlockSequence] = []
        for request, width in zip(request_ids, beam_widths or [1] * len(request_ids), strict=True):
            beams = self._sequences[request]
            if width > len(beams) > 1:
                raise ValueError(f"{width} beams of request {request}, which was opened with {len(beams)}")
            sequences += beams * width if len(beams) == 1 else beams[:width]
        counts = [sequence.length for sequence in sequences]
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        (on_device,) = upload([rows], self.device)
        table = self.cache.memory.table.req_to_token[:, : max([1, *counts])]
        return table.index_select(0, on_device), counts

    def _num_blocks(self, num_tokens: int) -> int:
        if not 1 <= num_tokens <= self.max_seq_len:
            raise ValueError(f"a request of {num_tokens} tokens; there can be 1 to {self.max_seq_len}")
        return -(-num_tokens // self.tokens_per_block)
