"""The numbers of one step that every layer's attention needs: who is in the batch, how far along, and where.

Knows the token table and no K/V, no model and no backend. Its fields carry TensorRT-LLM's names (context is
prefill, generation is decode); `rows`, `kv_lens`, `q_starts` and `slot_mapping` are our own. A batch is
packed: the contexts first, each any number of tokens, then the generations, one token each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import packed_size, upload
from lightkv.triton_kernels.attention.decode_plan import SharedPrefixGroups


@dataclass(frozen=True)
class KVCacheParams:
    """What the cache held of each sequence before this step."""

    use_cache: bool
    num_cached_tokens_per_seq: list[int]


class AttentionMetadata:
    """Filled by `prepare` once a step, read by every layer's backend. With B sequences of T tokens in all:

    - host: `num_prefills`, `num_generations`, `num_tokens`, `num_prefill_tokens`,
      `seq_lens` int32 `[B]` (this step's tokens of each sequence, on the CPU), `context_lens` (those of the
      contexts), `request_ids`, `prompt_lens`, `kv_cache_params`, `rows_host` and `kv_lens_host` int64 `[B]`,
      `num_sinks` (0 unless sequences that have dropped tokens still hold the first ones);
    - device: `seq_lens_cuda` int32 `[B]`, `position_ids` int64 `[T]`, `rows` int64 `[B]` (of the table),
      `kv_lens` int32 `[B]` (tokens in the cache, this step's included), `q_starts` int32 `[B + 1]`,
      `slot_mapping` int64 `[T]` (where this step's K/V goes), `dropped` int64 `[T]` (None: nothing is),
      `groups` (generations that have their first tokens in the same slots; None: none are read together).

    With sinks, a query attends to the first `num_sinks` entries as though what was dropped had never been, and
    to the others at their true positions.

    With `is_cuda_graph` it holds a decode batch of exactly `max_num_requests` in tensors that never move, the
    rest of a smaller batch being padding: row 0, length 0, position 0, slot 0.

    `group_members`: how many generations a group has at most (`attention.group_members` of the backends); 1:
    there are no groups, whatever `prepare` is told.
    """

    def __init__(
        self,
        max_num_requests: int,
        max_num_tokens: int,
        kv_cache_manager: KVMemory,
        is_cuda_graph: bool = False,
        group_members: int = 1,
    ) -> None:
        self.max_num_requests = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.kv_cache_manager = kv_cache_manager
        self.is_cuda_graph = is_cuda_graph
        self.group_members = group_members
        self.step = 0  # counts `prepare`, so that what was derived from the numbers can be told to be stale
        self.plan: object | None = None  # what the backend in use derives once a step for all its layers
        self._static: torch.Tensor | None = None
        self.prepare([], [], [], 0)

    def create_cuda_graph_metadata(self, max_batch_size: int) -> "AttentionMetadata":
        """Metadata for decode batches of up to `max_batch_size`, in static tensors, to capture a graph on.

        `prepare` loads a batch in one upload, outside the graph; kernels inside it may change `rows`,
        `kv_lens`, `position_ids` and `slot_mapping` in place.
        """
        return AttentionMetadata(
            max_batch_size,
            max_batch_size,
            self.kv_cache_manager,
            is_cuda_graph=True,
            group_members=self.group_members,
        )

    @property
    def context_lens(self) -> torch.Tensor:
        """This step's tokens of each context, int32 `[num_prefills]` on the CPU."""
        return self.seq_lens[: self.num_prefills]

    def prepare(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        num_prefills: int,
        *,
        request_ids: Sequence[int] = (),
        prompt_lens: Sequence[int] = (),
        dropped: Sequence[int] = (),
        num_sinks: int = 0,
        prefixes: Sequence[SharedPrefix] | None = None,
    ) -> None:
        """Take in a step's batch, with one upload (two where tokens were dropped) and without synchronising.

        Sequence i sits in row `rows[i]`, has K/V in its first `starts[i]` entries, and computes `counts[i]`
        more, whose slots the table has already. The first `num_prefills` are contexts. `request_ids` and
        `prompt_lens` are only kept.

        `dropped`: the positions that each sequence has passed and holds no more; its next token's is that many
        beyond its entry. `num_sinks`: the first entries that all of them still hold (see above); then each has
        to have dropped something, and is a context, be it of one token.

        `prefixes`: the generations that have their first entries in the same slots, which are then read once
        (`KVCache.shared_prefixes`); no row twice. For a graph that is captured with groups, pass a list even
        where there are none. Raises ValueError for a batch that breaks these rules or the maxima.
        """
        row, start, count = (np.array(numbers, dtype=np.int64) for numbers in (rows, starts, counts))
        self._validate(row, start, count, num_prefills)
        gap = np.array(dropped, dtype=np.int64) if len(dropped) else np.zeros_like(row)
        self._validate_dropped(start, gap, num_prefills, num_sinks)
        cached = start.tolist()
        kv_len = start + count
        if self.is_cuda_graph:
            padding = self.max_num_requests - len(row)
            row, start, kv_len, gap = (np.pad(numbers, (0, padding)) for numbers in (row, start, kv_len, gap))
            count = np.ones_like(row)
        q_starts = np.zeros(len(row) + 1, dtype=np.int32)
        np.cumsum(count, out=q_starts[1:])
        table = self.kv_cache_manager.table
        entries = table.entries(row, start, count)
        may_group = self.group_members > 1 and len(row) - num_prefills > 1
        carries_groups = may_group and (self.is_cuda_graph or bool(prefixes))  # a graph's tensors always do
        grouped: list[np.ndarray] = []
        if carries_groups:
            generations = row[num_prefills:], start[num_prefills:]
            grouped = _grouped(*generations, prefixes or (), self.group_members)

        self.step += 1
        self.kv_cache_params = KVCacheParams(True, cached)
        self.rows_host, self.kv_lens_host = row, kv_len
        self.num_prefills = num_prefills
        self.num_generations = len(row) - num_prefills
        self.num_tokens = len(entries)
        self.num_prefill_tokens = int(q_starts[num_prefills])
        self.seq_lens = torch.from_numpy(count.astype(np.int32))
        self.request_ids = list(request_ids)
        self.prompt_lens = list(prompt_lens)

        arrays = [
            row,
            entries,
            entries + np.repeat(gap - row * table.max_entries, count),  # the positions
            kv_len.astype(np.int32),
            q_starts,
            count.astype(np.int32),
            *grouped,
        ]
        device = self.kv_cache_manager.device
        if self.is_cuda_graph and self._static is None:
            self._static = torch.empty(packed_size(arrays), dtype=torch.uint8, device=device)
            self.slot_mapping = torch.empty(self.num_tokens, dtype=torch.int64, device=device)
        uploaded = upload(arrays, device, out=self._static)
        self.rows, on_device, self.position_ids, self.kv_lens, self.q_starts, self.seq_lens_cuda = uploaded[
            :6
        ]
        self.groups: SharedPrefixGroups | None = None
        if carries_groups and prefixes is not None:
            members, keys, place = uploaded[6:]
            self.groups = SharedPrefixGroups(members.view(-1, self.group_members), keys, place)
        slots = table.read(on_device)
        if self.is_cuda_graph:
            self.slot_mapping.copy_(slots)
        else:
            self.slot_mapping = slots.long()
        self.num_sinks = num_sinks
        self.dropped = upload([np.repeat(gap, count)], device)[0] if gap.any() else None

    def _validate(self, row: np.ndarray, start: np.ndarray, count: np.ndarray, num_prefills: int) -> None:
        if not len(row) == len(start) == len(count):
            raise ValueError(
                f"{len(row)} rows, {len(start)} starts and {len(count)} counts: one each a sequence"
            )
        if len(row) > self.max_num_requests or count.sum() > self.max_num_tokens:
            raise ValueError(
                f"{len(row)} sequences of {count.sum()} tokens; this metadata takes {self.max_num_requests} "
                f"of {self.max_num_tokens}: split the step, or make it larger"
            )
        if not 0 <= num_prefills <= len(row) or (self.is_cuda_graph and num_prefills):
            limit = 0 if self.is_cuda_graph else len(row)
            raise ValueError(f"{num_prefills} contexts; there can be 0 to {limit} here")
        if (count < 1).any() or (count[num_prefills:] != 1).any():
            raise ValueError(
                f"counts {count.tolist()} with {num_prefills} contexts: a context computes at least one "
                "token, a generation exactly one, and the contexts come first"
            )

    def _validate_dropped(
        self, start: np.ndarray, gap: np.ndarray, num_prefills: int, num_sinks: int
    ) -> None:
        if len(gap) != len(start) or (gap < 0).any() or num_sinks < 0:
            raise ValueError(
                f"{gap.tolist()} tokens dropped by {len(start)} sequences with {num_sinks} sinks: give 0 or "
                "more, one number a sequence"
            )
        if self.is_cuda_graph and gap.any():
            raise ValueError(
                f"{gap.tolist()} tokens dropped: in a decode graph positions are entries; run this step eagerly"
            )
        if num_sinks and (num_prefills < len(start) or not gap.all() or (start < num_sinks).any()):
            raise ValueError(
                f"{num_sinks} sinks: in such a step every sequence is a context, has dropped tokens and holds "
                f"the sinks; here {num_prefills} of {len(start)} are contexts, they have dropped "
                f"{gap.tolist()} and hold {start.tolist()}. Run the others in a step of their own"
            )


def _grouped(
    rows: np.ndarray, starts: np.ndarray, prefixes: Sequence[SharedPrefix], group_members: int
) -> list[np.ndarray]:
    """`SharedPrefixGroups` of generations in `rows`, flat: members, keys, place. Raises ValueError.

    What has more members than a group takes is cut into several, of sizes as equal as they can be. Of two
    members at least, so that there are never more groups than half the batch.
    """
    members = np.full((len(rows) // 2, group_members), -1, dtype=np.int32)
    keys = np.zeros(len(members), dtype=np.int32)
    place = np.full(len(rows), -1, dtype=np.int32)
    known = {row: i for i, row in enumerate(rows.tolist())} if prefixes else {}
    num = 0
    for prefix in prefixes:
        chosen = np.array([known.pop(row, -1) for row in prefix.rows])
        if (chosen < 0).any() or (starts[chosen] < prefix.num_tokens).any():
            raise ValueError(
                f"rows {prefix.rows} are to read {prefix.num_tokens} entries together: each has to be a "
                "generation that has had so many before this step, and named once"
            )
        for part in np.array_split(chosen, -(-len(chosen) // group_members)):
            if len(part) > 1:
                members[num, : len(part)] = part
                keys[num] = prefix.num_tokens
                place[part] = num * group_members + np.arange(len(part))
                num += 1
    return [members.reshape(-1), keys, place]
