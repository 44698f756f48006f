"""lightkv as the cache of Hugging Face's own `generate`: greedy, sampled, batched, with beams, assisted.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.hf_cache import LightKVCache
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2)
>>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[5, 6, 7, 8]])
>>> cache = LightKVCache(model, capacity=200)
>>> output = model.generate(ids, past_key_values=cache, num_beams=4, max_new_tokens=6, do_sample=False)
>>> output = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=6,
...                         do_sample=False)
>>> cache.num_hit, cache.kv.num_held <= 4 + 6
(3, True)

The model's own attention functions take K and V as one dense tensor. So K/V is gathered from the pool for every
layer of every step, much as transformers' own cache copies K/V to grow. After `bind(model)` (in
`integrations/model/hf_model.py`) lightkv's attention reads the pool instead. Padding and cached tokens are then
not computed, and a prompt is computed once for all its beams; but such a model works with this cache only.

Padding is on the left and takes no slots. Positions do not count it, so a prompt is hit whatever its padding.
"""

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lightkv.integrations.model.attention_call import ATTENTION
from lightkv.integrations.model.hf_model import PackedStep
from lightkv.integrations.model.probe import probe, require_plain_cache
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.sequence import Sequence
from lightkv.memory.staging import upload
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

from .cached_model import assemble, select


class _ModelCall(NamedTuple):
    """What the cache has to know of a call of the model."""

    input_ids: torch.Tensor  # int64 [B, new columns]
    padding: list[int]  # columns of padding, of each row
    num_logits: int  # the last columns of which each row gets logits


class _Part(NamedTuple):
    """What a step computes of one row: `num_tokens` entries from entry `start`."""

    row: int  # of the batch
    start: int
    num_tokens: int


class _GatheredStep(NamedTuple):
    """A step on the model's own attention: which K/V is written, and which every row sees."""

    source: torch.Tensor  # int64 [n]: the computed tokens that are new, as places in [B * T], row by row
    slots: torch.Tensor  # int64 [n]: the slots that their K/V is written to
    seen: torch.Tensor  # int64 [B * width]: the slots of each row, column by column; 0 in padding


class _Pending(NamedTuple):
    """The call of the model that has begun and not ended, or has failed."""

    step: _GatheredStep | PackedStep | None  # None while slots are allocated and the step is not made yet
    input_ids: torch.Tensor  # int64 [B, new columns]
    first: int  # the first column that it computes
    num_logits: int  # of each row


class LightKVCache(Cache):
    """K/V of up to `capacity` tokens for `model`, which stays as it is but for two hooks on its forward pass.

    Each `generate` begins a new text. The part of it that is cached, from any earlier call, is not computed
    again. Direct calls of the model continue the present batch until `reset`. A mask may hide the padding that
    a batch begins with, and nothing else. Positions may be given, but have to be those of the unpadded text.

    `max_sequences` limits the rows of a batch, beams included, and `max_entries` the length of a text; the
    default is the model's context, or the capacity if that is smaller. `backend` names the backend of lightkv's
    attention, for a model that is bound to it. `kv` is the cache itself, with its counts, its map and `evict`.

    `kv_format` says how K and V are stored, as for `CachedModel`.

    Raises UnsupportedModel, OutOfMemory, and ValueError for a format that does not fit the model. A call of
    the model raises OutOfTokens, OutOfRows, SequenceTooLong, and ValueError for what cannot be cached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        max_sequences: int = 16,
        max_entries: int | None = None,
        backend: str | None = None,
        kv_format: KVFormat = AS_COMPUTED,
    ) -> None:
        shape = probe(model)
        require_plain_cache(model, shape)
        super().__init__(layers=[_Layer(self, layer_idx) for layer_idx in range(shape.spec.num_layers)])
        self.kv, self._step = assemble(
            model, shape, capacity, max_sequences, max_entries, backend, kv_format=kv_format
        )
        self._sequences: list[Sequence] = []  # one for each row of the batch
        self._padding: list[int] = []
        self._ids = torch.empty(0, 0, dtype=torch.int64, device=model.device)  # [B, columns so far]
        self._pending: _Pending | None = None  # also after a call of the model that failed
        self._scratch: torch.Tensor | None = None
        # The hooks hold weak references, so that an unused cache is freed and its hooks are removed.
        begin, end = weakref.WeakMethod(self._begin), weakref.WeakMethod(self._end)
        hooks = (
            model.register_forward_pre_hook(lambda *call: _call(begin, call), with_kwargs=True),
            model.register_forward_hook(lambda *call: _call(end, call), with_kwargs=True),
        )
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    @property
    def num_columns(self) -> int:
        """Columns of the batch so far, padding included; during a call of the model, those before the call."""
        return self._ids.shape[1] if self._pending is None else self._pending.first

    @property
    def num_hit(self) -> int:
        """The number of tokens that were cached when the present batch began, summed over its rows."""
        return sum(sequence.num_hit for sequence in self._sequences)

    def reset(self) -> None:
        """Ends the present batch: its tokens are held no longer, and stay cached while there is room."""
        failed, self._pending = self._pending is not None, None
        ids = [] if failed else self._ids.tolist()
        for row, sequence in enumerate(self._sequences):
            if failed:  # some layers have no K/V of the last tokens
                self.kv.close(sequence, cache=False)
            else:
                known = self._padding[row] + len(sequence.prompt) // TOKEN_BYTES
                self.kv.close(sequence, ids[row][known:])
        if failed:
            self.kv.retract()
        self._sequences = []
        self._ids = self._ids[:0, :0]

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, _: bool) -> None:
        # `generate` sets this, then asks for the number of cached tokens and cuts as many off its text, without
        # comparing the texts. So the number has to be 0 here; `_begin` finds the cached tokens by their ids.
        self.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continues row `beam_idx[i]` as row i, by forks, which copy no K/V. `beam_idx` is int64 `[rows]`."""
        order = beam_idx.tolist()
        self._sequences = select(self.kv, self._sequences, order)
        self._padding = [self._padding[row] for row in order]
        self._ids = self._ids.index_select(0, beam_idx.to(self._ids.device))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Continues only the rows at `indices`."""
        self.reorder_cache(torch.arange(len(self._sequences))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continues every row as `repeats` rows."""
        self.reorder_cache(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every row; their number is given as a negative one.

        Raises ValueError for a number above 0, and where a row has fewer tokens without its padding; then no
        row is cropped.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a tensor
        shortest = min((sequence.length for sequence in self._sequences), default=0)
        if not -shortest <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative one; "
                f"the shortest row has {shortest} tokens"
            )
        if tokens_to_remove:
            for sequence in self._sequences:
                self.kv.truncate(sequence, sequence.length + tokens_to_remove)
            self._ids = self._ids[:, :tokens_to_remove]

    def update_layer(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a layer's new K/V, and gathers the K/V that its attention sees.

        keys, values: `[B, heads, T, dim]`. Returns both as `[B, heads, width, dim]`, which stay valid until the
        next call.
        """
        if self._pending is None or not isinstance(self._pending.step, _GatheredStep):
            raise ValueError(
                "this cache works in calls of the whole model that it was made for, not in calls of its parts"
            )
        source, slots, seen = self._pending.step
        pool, num_rows = self.kv.memory.pool, len(keys)
        # Both as [B * T, heads, dim].
        tokens = (fresh.detach().transpose(1, 2).flatten(0, 1) for fresh in (keys, values))
        pool.write(layer_idx, slots, *(fresh.index_select(0, source) for fresh in tokens))
        if pool.format(layer_idx).is_quantised:
            k, v = pool.read(layer_idx, seen.view(num_rows, -1))
            return k.transpose(1, 2), v.transpose(1, 2)
        numel = len(seen) * pool.kv(layer_idx).shape[1]
        if self._scratch is None or self._scratch.numel() < numel:
            # Texts grow by a token in each step, so there is room for half as much again.
            self._scratch = keys.new_empty(numel + numel // 2)
        gathered = torch.index_select(
            pool.kv(layer_idx), 0, seen, out=self._scratch[:numel].view(len(seen), -1)
        ).view(num_rows, len(seen) // num_rows, -1)
        all_keys, all_values = (part.transpose(1, 2) for part in pool.spec.split(gathered, layer_idx))
        return all_keys, all_values

    def _begin(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs before the model's forward pass: allocates slots, and cuts the call down to uncached tokens."""
        if kwargs.get("past_key_values") is not self:
            return None
        call = self._read_call(args, kwargs)
        parts, same_as = self._allocate(call)
        pending = _Pending(None, call.input_ids, self.num_columns, call.num_logits)
        self._pending = pending
        kwargs = dict(kwargs)
        if model.config.get_text_config()._attn_implementation == ATTENTION:
            kwargs.update(self._pack(parts, same_as, call), lightkv=self._step, use_cache=False)
            del kwargs["past_key_values"]
            kwargs.pop("attention_mask", None)
            self._pending = pending._replace(step=self._step)
        else:
            step, first, changed = self._gather(parts, call.input_ids)
            kwargs.update(changed)
            self._pending = pending._replace(step=step, first=first)
        return (), kwargs

    def _read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _ModelCall:
        """Checks the arguments of a call of the model. Raises ValueError for what cannot be cached."""
        input_ids = args[0] if len(args) == 1 else kwargs.get("input_ids")
        mask, num_logits = kwargs.get("attention_mask"), kwargs.get("logits_to_keep", 0)
        if self._pending is not None:
            raise ValueError("the last call of the model failed, which leaves its K/V unknown: call reset()")
        if input_ids is None or len(args) > 1 or not isinstance(num_logits, int):
            raise ValueError(
                "a prompt is found by its token ids: pass input_ids, logits_to_keep as a number if at all, and "
                "everything by its name"
            )
        num_rows, num_new = input_ids.shape
        width = self.num_columns + num_new
        wrong_rows = self._sequences and num_rows != len(self._sequences)
        shape = None if mask is None else tuple(getattr(mask, "shape", ()))
        if not num_new or wrong_rows or shape not in (None, (num_rows, width)):
            raise ValueError(
                f"{num_new} tokens of {num_rows} rows and a mask of {shape}, after {self.num_columns} tokens "
                f"of {len(self._sequences)} rows: call reset() before another text"
            )
        padding = self._padding if self._sequences else _left_padding(mask, num_rows, num_new)
        self._require_own_columns(
            padding, mask if self._sequences else None, kwargs.get("position_ids"), num_new
        )
        return _ModelCall(input_ids, padding, min(num_logits or num_new, num_new))

    def _require_own_columns(
        self, padding: list[int], mask: torch.Tensor | None, position_ids: Any, num_new: int
    ) -> None:
        """Raises ValueError for a mask or positions other than those that the cached K/V was computed with.

        `padding` has the columns of padding of every row, `mask` `[rows, columns]` is that of a batch that
        continues. Synchronises.
        """
        starts = np.array(padding)[:, None]
        columns = np.arange(self.num_columns + num_new)
        real = columns >= starts
        if self._sequences and mask is None and any(padding):
            raise ValueError(
                f"rows with {padding} columns of padding continue without a mask: pass it in every call"
            )
        if mask is not None and ((mask != 0).cpu().numpy() != real).any():
            raise ValueError(
                f"the mask is not that of the {padding} columns of padding which the rows began with, and "
                "computed tokens cannot be hidden: call reset(), and begin a text without them"
            )
        if position_ids is not None:
            new = slice(self.num_columns, None)
            expected = (columns - starts)[:, new]
            given = position_ids.cpu().numpy()
            if given.shape not in (expected.shape, (1, num_new)) or (given != expected)[real[:, new]].any():
                raise ValueError(
                    f"position_ids {given.tolist()}, where the text without its padding has "
                    f"{expected.tolist()}: leave them out"
                )

    def _allocate(self, call: _ModelCall) -> tuple[list[_Part], list[int]]:
        """Allocates slots for a call, which begins or continues the batch.

        Returns what is to be computed, and for every row the first row that has the same text.
        """
        if not self._sequences:
            self._padding = call.padding
            return self._open(call.input_ids.tolist(), call.num_logits)
        num_rows, num_new = call.input_ids.shape
        parts = [_Part(row, sequence.length, num_new) for row, sequence in enumerate(self._sequences)]
        self.kv.extend(self._sequences, [num_new] * num_rows)
        return parts, list(range(num_rows))

    def _open(self, texts: list[list[int]], num_logits: int) -> tuple[list[_Part], list[int]]:
        """Opens a sequence for every row, as a fork where an earlier row has the same text.

        Tokens that are not cached have to be computed, and the last `num_logits` tokens in any case. Returns
        the same as `_allocate`.
        """
        sequences: list[Sequence] = []
        parts = []
        first_with: dict[tuple[int, ...], int] = {}
        same_as = []
        try:
            for row, (columns, padding) in enumerate(zip(texts, self._padding, strict=True)):
                text = columns[padding:]
                first = first_with.setdefault(tuple(text), row)
                same_as.append(first)
                if first < row:
                    sequences.append(self.kv.fork(sequences[first]))
                    continue
                # `open` leaves at least the last token of its prompt to be computed. The prompt is cut here, so
                # that it leaves as many tokens as get logits.
                sequence = self.kv.open(text[: max(len(text) - num_logits + 1, 1)])
                sequences.append(sequence)
                parts.append(_Part(row, sequence.length, len(text) - sequence.length))
                self.kv.extend([sequence], [parts[-1].num_tokens])
                # Later rows of this very step may hit it: every layer writes its K/V before it attends.
                self.kv.publish(sequence)
        except BaseException:
            for sequence in sequences:
                self.kv.close(sequence, cache=False)
            self.kv.retract()
            raise
        self._sequences = sequences
        return parts, same_as

    def _pack(self, parts: list[_Part], same_as: list[int], call: _ModelCall) -> dict[str, torch.Tensor]:
        """Returns the changed arguments of a call on lightkv's attention, which computes `parts` alone."""
        _, starts, counts = (list(numbers) for numbers in zip(*parts, strict=True))
        rows = [self._sequences[part.row].row for part in parts]
        metadata = self._step.metadata
        metadata.prepare(rows, starts, counts, len(rows) if max(counts) > 1 else 0)
        ends = dict(zip((part.row for part in parts), np.cumsum(counts).tolist(), strict=True))
        length = {part.row: part.num_tokens for part in parts}
        wanted = [
            # In padding, where logits mean nothing, those of the first token are returned.
            ends[first] - min(length[first], call.num_logits - idx)
            for first in same_as
            for idx in range(call.num_logits)
        ]
        source = self._sources(parts, self.num_columns, call.input_ids.shape[1])
        device = call.input_ids.device
        source_there, wanted_there = upload([source, np.array(wanted, dtype=np.int64)], device)
        return {
            "input_ids": call.input_ids.flatten().index_select(0, source_there)[None],
            "position_ids": metadata.position_ids[None],
            "logits_to_keep": wanted_there,
        }

    def _gather(
        self, parts: list[_Part], input_ids: torch.Tensor
    ) -> tuple[_GatheredStep, int, dict[str, torch.Tensor]]:
        """Prepares a call on the model's own attention, from the first column that any row needs computed.

        Returns the step, that column, and the changed arguments.
        """
        first = min(self._padding[part.row] + part.start for part in parts)
        width = self.num_columns + input_ids.shape[1]
        num_rows, table = len(self._sequences), self.kv.memory.table
        padding = np.array(self._padding, dtype=np.int64)[:, None]
        rows = np.array([sequence.row for sequence in self._sequences], dtype=np.int64)[:, None]
        columns = np.arange(width)
        seen = np.where(columns < padding, 0, rows * table.max_entries + columns - padding)
        _, starts, counts = zip(*parts, strict=True)
        entries = table.entries([self._sequences[part.row].row for part in parts], starts, counts)
        source = self._sources(parts, first, width - first)
        positions = np.maximum(columns[first:] - padding, 0)
        source_there, entries_there, seen_there, positions_there = upload(
            [source, entries, seen.reshape(-1), positions.reshape(-1)], input_ids.device
        )
        step = _GatheredStep(source_there, table.read(entries_there).long(), table.read(seen_there).long())
        changed = {
            "input_ids": input_ids[:, first - width :],
            "position_ids": positions_there.view(num_rows, -1),
        }
        return step, first, changed

    def _sources(self, parts: list[_Part], first: int, num_columns: int) -> np.ndarray:
        """Returns the places of the tokens of `parts` among `num_columns` columns from `first`, flattened.

        int64, packed.
        """
        starts = [row * num_columns + self._padding[row] + start - first for row, start, _ in parts]
        return np.concatenate(
            [np.arange(start, start + part.num_tokens) for start, part in zip(starts, parts, strict=True)]
        )

    def _end(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Runs after the model's forward pass: records what it computed."""
        pending = self._pending
        is_own = kwargs.get("past_key_values") is self or kwargs.get("lightkv") is self._step
        if pending is None or not is_own:
            return None
        self._pending = None
        self.kv.confirm()
        self._ids = torch.cat((self._ids, pending.input_ids), 1) if len(self._ids) else pending.input_ids
        if isinstance(pending.step, PackedStep):
            output["logits"] = output.logits[0].unflatten(0, (-1, pending.num_logits))
            output["past_key_values"] = self
        return output


class _Layer(CacheLayerMixin):
    """One layer of a LightKVCache, with the methods that transformers calls."""

    is_croppable = True

    def __init__(self, cache: LightKVCache, layer_idx: int) -> None:
        super().__init__()
        self._cache = weakref.proxy(cache)
        self._layer_idx = layer_idx

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the pool is allocated when the cache is made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update_layer(self._layer_idx, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.num_columns

    def get_max_length(self) -> int:
        return self._cache.kv.ledger.max_entries


def _call(method: weakref.WeakMethod[Any], call: tuple[Any, ...]) -> Any:
    """Calls a hook whose cache may have been freed."""
    found = method()
    return None if found is None else found(*call)


def _left_padding(mask: torch.Tensor | None, num_rows: int, num_columns: int) -> list[int]:
    """Returns the columns of padding of each row. Raises ValueError if padding is not on the left."""
    if mask is None:
        return [0] * num_rows
    real = (mask != 0).cpu().numpy()
    padding = num_columns - real.sum(1)
    if (padding == num_columns).any() or (real != (np.arange(num_columns) >= padding[:, None])).any():
        raise ValueError(
            "a row consists of padding alone, or is padded elsewhere than on the left: pad the prompts there"
        )
    return padding.tolist()
