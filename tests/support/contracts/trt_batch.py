"""A batch through TensorRT-LLM's attention backend, and dense attention in float64 over the same keys."""

from typing import Any

import torch

from lightkv.contracts.tensorrt_llm import AttentionBackend, AttentionMetadata, KVCacheManager, KVCacheParams

FP8 = torch.float8_e4m3fn
HALF = {"atol": 2e-3, "rtol": 2e-3}
MIXED: dict[str, Any] = {"q_lens": [11, 5, 1, 1, 1], "cached": [0, 13, 20, 7, 8], "num_contexts": 2}


class KernelBackend(AttentionBackend):
    """Runs the kernels on a CPU, too, by Triton's interpreter."""

    kernels_on_cpu = True


class Batch:
    """A batch of sequences whose caches are filled, with a dense copy of what they hold.

    `q_lens` and `kv_lens` are this step's, `cached` what is there before; all K and V are drawn for the first
    `num_contexts` contexts and the generations behind them. Blocks of the sequences are interleaved. `on_grid`:
    this step's K and V are values that the cache holds exactly, also without a scale.
    """

    def __init__(
        self,
        device: torch.device,
        q_lens: list[int],
        cached: list[int],
        num_contexts: int,
        *,
        kv_lens: list[int] | None = None,
        num_layers: int = 1,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float16,
        cache_dtype: torch.dtype | None = None,
        scale: float = 1.0,
        on_grid: bool = False,
        **changes: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        self.q_lens, self.cached = q_lens, cached
        self.kv_lens = q_lens if kv_lens is None else kv_lens
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.lengths = [old + new for old, new in zip(cached, self.kv_lens, strict=True)]
        self.requests = [10 + number for number in range(len(q_lens))]
        settings: dict[str, Any] = {"tokens_per_block": 8, "max_seq_len": max(self.lengths) + 40}
        self.manager = KVCacheManager(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_batch_size=len(q_lens),
            dtype=cache_dtype or dtype,
            device=device,
            **{**settings, **changes},
        )
        self.manager.add_dummy_requests(self.requests)
        for length in range(1, max(self.lengths) + 1, 3):
            for request, most in zip(self.requests, self.lengths, strict=True):
                self.manager.resize(request, max(min(length + 2, most), 1))
        shape = len(q_lens), max(self.lengths), num_kv_heads, head_dim
        self.dense = [[torch.randn(shape, device=device).to(dtype) for _ in "kv"] for _ in range(num_layers)]
        blocks = self.manager.get_batch_cache_indices(self.requests)
        for layer_idx, dense in enumerate(self.dense):
            buffer = self.manager.get_buffers(layer_idx, "NHD")
            buffer[1:] = 77 if buffer.dtype == torch.int8 else float("nan")
            for number, own in enumerate(blocks):
                for side in range(2):
                    stored = dense[side][number, : cached[number]].float() / scale
                    if buffer.dtype == torch.int8:
                        stored = stored.round().clamp(-127, 127)
                    page = self.manager.tokens_per_block
                    for at in range(0, cached[number], page):
                        part = stored[at : at + page].to(buffer.dtype)
                        buffer[own[at // page], side, : len(part)] = part
                    # What an 8-bit cache holds is what is attended to. With a scale, new keys are on its grid.
                    rounded = self.lengths[number] if on_grid or scale != 1 else cached[number]
                    stored = dense[side][number, :rounded].float() / scale
                    if buffer.dtype == torch.int8:
                        stored = stored.round().clamp(-127, 127)
                    held = stored.to(buffer.dtype).float() * scale
                    dense[side][number, :rounded] = held.to(dtype)
        self.q = [
            torch.randn(sum(q_lens), num_heads * head_dim, device=device).to(dtype) for _ in range(num_layers)
        ]
        self.metadata = AttentionMetadata(
            max_num_requests=len(q_lens),
            max_num_tokens=8192,
            kv_cache_manager=self.manager,
            request_ids=self.requests,
            seq_lens=torch.tensor(q_lens, dtype=torch.int32),
            seq_lens_kv=None if kv_lens is None else torch.tensor(kv_lens, dtype=torch.int32),
            num_contexts=num_contexts,
            kv_cache_params=KVCacheParams(use_cache=True, num_cached_tokens_per_seq=cached),
        )

    def new_keys(self, layer_idx: int = 0) -> list[torch.Tensor]:
        """This step's K and V, `[num_kv_tokens, num_kv_heads * head_dim]` each."""
        return [
            torch.cat([one[b, self.cached[b] : length].flatten(1) for b, length in enumerate(self.lengths)])
            for one in self.dense[layer_idx]
        ]

    def backend(self, layer_idx: int = 0, kind: type = AttentionBackend, **kwargs: Any) -> AttentionBackend:
        made: AttentionBackend = kind(layer_idx, self.num_heads, self.head_dim, self.num_kv_heads, **kwargs)
        return made

    def expected(
        self,
        layer_idx: int = 0,
        *,
        causal: bool = True,
        window: int = 0,
        chunk: int = 0,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Dense attention in float64, `[num_q_tokens, num_heads * head_dim]`."""
        out, begin, group = [], 0, self.num_heads // self.num_kv_heads
        for number, (count, length) in enumerate(zip(self.q_lens, self.lengths, strict=True)):
            q = self.q[layer_idx][begin : begin + count].view(count, self.num_heads, -1).double()
            begin += count
            k, v = (
                one[number, :length].double().repeat_interleave(group, 1) for one in self.dense[layer_idx]
            )
            scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or self.head_dim**-0.5)
            query = torch.arange(length - count, length, device=self.device)[:, None]
            key = torch.arange(length, device=self.device)
            seen = (key <= query) if causal else torch.ones_like(key + query, dtype=torch.bool)
            if window:
                seen &= key > query - window
            if chunk:
                seen &= key >= query // chunk * chunk
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                column = sinks.double().view(-1, 1, 1).expand(-1, count, 1)
                weights = torch.cat([scores, column], 2).softmax(2)[..., :-1]
            else:
                weights = scores.softmax(2) if length else scores
            out.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return torch.cat(out)


def close_to(found: torch.Tensor, wanted: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(found.double(), wanted, **(tolerance or HALF))


class ForeignManager:
    """A manager with nothing but the contract's two methods; its blocks are NHD, and -1 is one that is gone."""

    def __init__(self, batch: Batch) -> None:
        self._buffer = batch.manager.get_buffers(0, "NHD").contiguous()
        self._blocks = batch.manager.get_batch_cache_indices(batch.requests)

    def get_buffers(self, layer_idx: int) -> torch.Tensor:
        return self._buffer

    def get_batch_cache_indices(self, request_ids: list[int]) -> list[list[int]]:
        return [[*self._blocks[request - 10], -1] for request in request_ids]
