"""FlashAttention 3 as a side of `attention.py`: the library out of vLLM's wheel, called as vLLM calls it.

The library is one file of torch's stable ABI that needs nothing else of vLLM. K and V are views of lightkv's
pool, in pages of any size, and a request's queries are the last of its tokens:

    page_table[request, position // page]   the page of a token
    q[cu_seqlens_q[r] : cu_seqlens_q[r + 1]], seqused_k[r]   a request's queries, and the number of its keys
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common.device_clock import Clock, captured
from bench.common.steady import SWEEP

from .attention_batches import Batch, Paged, offsets
from .attention_peers import Side

LIBRARY = "_vllm_fa3_C"
FILE = f"{LIBRARY}.abi3.so"
# Upper bounds of the parts that a request's keys are cut into; the library takes fewer where it finds that
# better. With 0 it chooses the bound itself. vLLM's graphs use 32.
SPLITS = (0, 1, 2, 4, 8, 16, 32, 64)
PARTIAL_BYTES = 2**30  # of the sweep: the most bytes of partial outputs, float32 for each part


def find_library(file: Path | None = None) -> Path:
    """Returns the library: `file`, or `FILE` in the folder `file`, or else in an installed vLLM.

    Raises FileNotFoundError, which says how to get it.
    """
    remedy = (
        f"take {FILE} out of vLLM's wheel (bench/serving/vllm_peer/assemble.sh packs it, as xz) and name it "
        "with --fa3"
    )
    if file is None:
        vllm = find_spec("vllm")  # imports nothing
        if vllm is None or not vllm.submodule_search_locations:
            raise FileNotFoundError(f"vLLM is not installed; {remedy}")
        file = Path(vllm.submodule_search_locations[0]) / "vllm_flash_attn"
    found = file / FILE if file.is_dir() else file
    if not found.is_file():
        raise FileNotFoundError(f"{found} does not exist; {remedy}")
    return found


def scheduler_arguments(batch: Batch, page_size: int, num_splits: int) -> dict[str, Any]:
    """Returns the arguments of `get_scheduler_metadata`, by name. Its result serves all layers of a step that
    are called with the same `num_splits`."""
    device = batch.q.device
    return {
        "batch_size": len(batch.lengths),
        "max_seqlen_q": max(batch.q_lens),
        "max_seqlen_k": max(batch.lengths),
        "num_heads": batch.heads.num_heads,
        "num_heads_k": batch.heads.num_kv_heads,
        "headdim": batch.heads.key_dim,
        "headdim_v": batch.heads.value_dim,
        "qkv_dtype": batch.q.dtype,
        "seqused_k": torch.tensor(batch.lengths, dtype=torch.int32, device=device),
        "cu_seqlens_q": offsets(batch.q_lens).to(device),
        "cu_seqlens_k": None,
        "cu_seqlens_k_new": None,
        "seqused_q": None,
        "leftpad_k": None,
        "page_size": page_size,
        "max_seqlen_k_new": 0,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "has_softcap": False,
        "num_splits": num_splits,
        "pack_gqa": None,
        "sm_margin": 0,
    }


def forward_arguments(
    batch: Batch, paged: Paged, out: Tensor, num_splits: int, metadata: Tensor | None
) -> dict[str, Any]:
    """Returns the arguments of `fwd`, by name. `metadata` is the result of `get_scheduler_metadata` for the
    same `num_splits`."""
    device, (k_pages, v_pages) = batch.q.device, paged.pages
    return {
        "q": batch.q,
        "k": k_pages,
        "v": v_pages,
        "k_new": None,
        "v_new": None,
        "q_v": None,
        "out": out,
        "cu_seqlens_q": offsets(batch.q_lens).to(device),
        "cu_seqlens_k": None,
        "cu_seqlens_k_new": None,
        "seqused_q": None,
        "seqused_k": torch.tensor(batch.lengths, dtype=torch.int32, device=device),
        "max_seqlen_q": max(batch.q_lens),
        "max_seqlen_k": max(batch.lengths),
        "page_table": paged.table,
        "kv_batch_idx": None,
        "leftpad_k": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "seqlens_rotary": None,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "softmax_scale": batch.scale,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "scheduler_metadata": metadata,
        "num_splits": num_splits,
        "pack_gqa": None,
        "sm_margin": 0,
        "s_aux": None,
        "cp_world_size": 1,
        "cp_rank": 0,
        "cp_tot_seqused_k": None,
    }


def splits_to_try(batch: Batch) -> list[int]:
    """Returns the bounds of `SPLITS` whose partial outputs are not too large, and whose parts are not shorter
    than a tile of keys."""
    tokens, heads, _ = batch.q.shape
    one_part = 4 * tokens * heads * (batch.heads.value_dim + 1)
    most = min(PARTIAL_BYTES // one_part, max(batch.lengths) // 64)
    return [count for count in SPLITS if count <= max(1, most)]


class FlashAttention3:
    """The library's two operators; `module` is their namespace. Another version of the library may take other
    arguments; torch then raises RuntimeError, which names them. `version` tells libraries apart, since the file
    does not say which version of vLLM it belongs to."""

    def __init__(self, module: Any, version: str = "") -> None:
        self._module = module
        self.version = version

    @classmethod
    def load(cls, file: Path | None) -> "FlashAttention3":
        """Loads the library (see `find_library`). Raises OSError if it is not there or does not load."""
        library = find_library(file)
        torch.ops.load_library(str(library))
        with library.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        return cls(getattr(torch.ops, LIBRARY), f"{library.name}, sha256 {digest[:12]}")

    def attend(self, batch: Batch, paged: Paged, num_splits: int) -> Side:
        """Attends with up to `num_splits` parts of each request's keys; 0 leaves the number to the library."""
        schedule = scheduler_arguments(batch, 1 << paged.shift, num_splits)

        def plan() -> Tensor:
            metadata: Tensor = self._module.get_scheduler_metadata(**schedule)
            return metadata

        out = batch.empty_out()
        arguments = forward_arguments(batch, paged, out, num_splits, plan())

        def run() -> Tensor:
            self._module.fwd(**arguments)
            return out

        return Side(run, plan=plan, setting={"num_splits": num_splits})

    def best(self, batch: Batch, paged: Paged, clock: Clock) -> Side:
        """Returns `attend` with the fastest number of splits. Raises what the last failing number raised, if
        all fail."""
        sides: dict[str, Side] = {}
        graphs = {}
        error: Exception | None = None
        for num_splits in splits_to_try(batch):
            try:
                side = self.attend(batch, paged, num_splits)
                side.run()
                graphs[str(num_splits)] = captured(side.run)[0]
                sides[str(num_splits)] = side
            except Exception as failed:
                error = failed
        if not sides:
            raise error or RuntimeError("there is no number of splits to try")
        took = {name: timing.median for name, timing in clock.replay_in_turns(graphs, SWEEP).items()}
        fastest = sides[min(took, key=lambda name: took[name])]
        return fastest._replace(setting={**(fastest.setting or {}), "sweep_us": took})
