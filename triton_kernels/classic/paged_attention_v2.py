"""The classic paged attention of vLLM in partitions (v2): some programs for each sequence, then a second kernel
that adds up what they found.

Blocks and results are those of `paged_attention_v1.py`. For each query head and each partition of a sequence's
tokens the first kernel writes the largest score, the sum of the exponentials of the scores less that one, and
the output of the partition alone.
"""

import torch
import triton
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_reference import attend_reference, change_reference
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.paged_kv import RECORDS, AttentionOptions
from lightkv.triton_kernels.attention.variants import Alibi
from lightkv.triton_kernels.attention.variants.variant import Scored
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.operators import operator

from .paged_attention_inputs import PagedInputs
from .paged_attention_kernel import Partials, attend_partitions, num_programs_for

PARTITION_SIZE = 512  # of the original


_PARTIALS = Tensors(
    exp_sums="contiguous float32 [S, H, partitions]",
    max_logits="contiguous float32 [S, H, partitions]",
    tmp_out="contiguous floats [S, H, partitions, D]",
)


@operator("paged_attention_v2", writes=("partials", "out"), records=(*RECORDS, PagedInputs, Partials))
def _paged_attention_v2(inputs: PagedInputs, partials: Partials, partition_size: int, out: Tensor) -> None:
    attend_partitions(inputs, partials, partition_size, out)


def paged_attention_v2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None = None,
    partition_size: int | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    exp_sums: Tensor | None = None,
    max_logits: Tensor | None = None,
    tmp_out: Tensor | None = None,
) -> Tensor:
    """Computes what `paged_attention_v1` computes, in partitions of each sequence's tokens.

    Args:
        q, k_cache, v_cache, block_tables, seq_lens, scale, alibi_slopes, out: as in `paged_attention_v1`.
        partition_size: tokens of a partition, a multiple of block_size. If None, the original's 512, or fewer
            where the device would be idle and `exp_sums` is None, too.
        max_seq_len: bounds the partitions that are launched; if None, the capacity of the tables does.
        exp_sums: float32 `[num_seqs, H, max_num_partitions]`, contiguous, to write the sums of the exponentials
            to, with enough partitions for max_seq_len. What belongs to no token is not written. This and the
            next two are given together, or allocated if None.
        max_logits: likewise, for the largest scores, scaled and with ALiBi.
        tmp_out: `[num_seqs, H, max_num_partitions, D]`, contiguous, of a floating type, for the normalised
            outputs of partitions; float32 where it is allocated.

    Returns:
        `[num_seqs, H, D]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit, or only some of the last three are given.
    """
    options = AttentionOptions(scale).plus(None if alibi_slopes is None else Alibi(alibi_slopes))
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, options)
    partials = None
    if exp_sums is not None and max_logits is not None and tmp_out is not None:
        partials = Partials(exp_sums, max_logits, tmp_out)
    elif exp_sums is not None or max_logits is not None or tmp_out is not None:
        raise ValueError("exp_sums, max_logits and tmp_out must be given together, or none of them")
    out, block_size = inputs.check(out), k_cache.shape[3]
    room = block_tables.shape[1] * block_size
    longest = room if max_seq_len is None else max_seq_len
    if not 0 <= longest <= room:
        raise ValueError(f"max_seq_len must be at most the {room} tokens of a table, got {longest}")
    if partition_size is None and partials is not None:
        partition_size = max(PARTITION_SIZE, block_size)
    if partition_size is None:
        device, num_programs = tuning.device_class(q.device), len(q) * num_programs_for(q, k_cache)
        partition_size = fitting_partition_size(device, num_programs, longest, block_size)
    if partition_size < 1 or partition_size % block_size:
        raise ValueError(
            f"partition_size must be a multiple of the {block_size} tokens of a block, got {partition_size}"
        )
    least = max(1, triton.cdiv(longest, partition_size))
    if partials is None:
        sums, logits = torch.empty((2, *q.shape[:2], least), dtype=torch.float32, device=q.device)
        made = torch.empty((*q.shape[:2], least, q.shape[2]), dtype=torch.float32, device=q.device)
        partials = Partials(sums, logits, made)
    sizes = dict(zip(("S", "H", "D"), q.shape, strict=True))
    if (most := _PARTIALS.check(sizes, **partials._asdict())["partitions"]) < least:
        raise ValueError(f"exp_sums, max_logits and tmp_out have {most} partitions; give at least {least}")
    _paged_attention_v2(inputs, partials, partition_size, out)
    return out


def fitting_partition_size(
    device: tuning.DeviceClass, num_programs: int, num_tokens: int, block_size: int
) -> int:
    """Returns the tokens of a partition of `paged_attention_v2`: the classic 512, or fewer where `num_programs`
    for each partition of a batch whose longest sequence has `num_tokens` would leave the device idle."""
    size = PARTITION_SIZE
    enough = 3 * device.num_multiprocessors
    while size > decode_tuning.DECODE_UNIT and num_programs * triton.cdiv(num_tokens, size) < enough:
        size //= 2
    return max(size, block_size)


def paged_attention_v2_reference(inputs: PagedInputs, partition_size: int, num_partitions: int) -> Partials:
    """Computes what the partitions of `paged_attention_v2` write in plain torch, in float32, with zeros where
    nothing is written; the output is that of `paged_attention_v1_reference`. Reads tables and lengths on the
    host, so on a GPU it synchronises."""
    q, options = inputs.q, inputs.options
    num_seqs, num_heads, head_dim = q.shape
    max_logits, exp_sums = torch.zeros(2, num_seqs, num_heads, num_partitions, device=q.device)
    tmp_out = torch.zeros(num_seqs, num_heads, num_partitions, head_dim, device=q.device)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        whole = Scored.of_last(slice(seq, seq + 1), seq, length, q.device)
        for partition, begin in enumerate(range(0, length, partition_size)):
            end = min(begin + partition_size, length)
            k, v = inputs.keys(seq, begin, end)
            scored = whole._replace(keys=whole.keys[begin:end])
            heads = k.double().repeat_interleave(num_heads // k.shape[1], dim=1)
            products = torch.einsum("hd,nhd->hn", q[seq].double(), heads) * options.scale_for(head_dim)
            scores = change_reference(products[:, None], options, scored)[:, 0]
            peaks = scores.amax(1)
            max_logits[seq, :, partition] = peaks
            exp_sums[seq, :, partition] = (scores - peaks[:, None]).exp().sum(1)
            tmp_out[seq, :, partition] = attend_reference(q[seq : seq + 1], k, v, options, scored)[0].float()
    return Partials(exp_sums, max_logits, tmp_out)
