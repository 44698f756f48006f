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

The model's own attention functions take K and V as one dense tensor, so these are gathered from the pool for
every layer of every step, as transformers' own cache copies them to grow. After `transformers.bind(model)` (the
file beside this) lightkv's attention takes them from the pool: padding and what the cache has are not computed
then, nor one prompt for every beam; such a model cannot be called without this cache.

Padding, on the left, takes no slots. Positions are those of the text without it, so that a prompt is hit
however it was padded. Knows no sampling, no beam and no proposal: only which rows go on, and what is cut off.
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

from .cached_model import assemble, select


class _Part(NamedTuple):
    """What a step computes of one row: `num_tokens` entries from `start` on."""

    row: int  # of the batch
    start: int
    num_tokens: int


class _GatheredStep(NamedTuple):
    """A step on the model's own attention: what is written where, and what every row sees."""

    source: torch.Tensor  # int64 [n]: which of the computed tokens, row by row, are new
    slots: torch.Tensor  # int64 [n]: where their K/V goes
    seen: (
        torch.Tensor
    )  # int64 [B * width]: the slots of every row, column by column; 0 where there is padding


class _Pending(NamedTuple):
    """The step that is being computed, and what will have been known when it is."""

    step: _GatheredStep | PackedStep | None  # None: slots are taken, and no more
    input_ids: torch.Tensor  # [B, new columns]
    first: int  # the first column that it computes
    num_logits: int  # of each row


class LightKVCache(Cache):
    """K/V of up to `capacity` tokens for `model`, which stays as it is but for two hooks on its forward pass.

    Every `generate` is a text of its own: what the cache has of it, from whichever earlier one, is not computed
    again. Calls of the model itself go on with the present batch until `reset`. A mask can hide the padding
    that a batch begins with, and nothing else; positions, if given, are those of the text without it.

    max_sequences: rows of a batch at most, beams included. max_entries: the longest text; by default the
    model's context, or the pool if that is smaller. backend: of lightkv's attention, where the model is bound
    to it. `kv` is the cache itself: its counts, its map, `evict`. Raises UnsupportedModel, OutOfMemory; a call
    of the model OutOfTokens, OutOfRows, SequenceTooLong, and ValueError for what cannot be cached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        max_sequences: int = 16,
        max_entries: int | None = None,
        backend: str | None = None,
    ) -> None:
        shape = probe(model)
        require_plain_cache(model, shape)
        super().__init__(layers=[_Layer(self, layer_idx) for layer_idx in range(shape.spec.num_layers)])
        self.kv, self._step = assemble(model, shape, capacity, max_sequences, max_entries, backend)
        self._sequences: list[Sequence] = []  # of every row of the batch
        self._padding: list[int] = []
        self._ids = torch.empty(0, 0, dtype=torch.int64, device=model.device)  # [B, columns so far]
        self._pending: _Pending | None = None  # left behind by a call of the model that failed
        self._scratch: torch.Tensor | None = None
        # A weak reference, so that a cache that nobody uses is freed, and takes its hooks along.
        mine = weakref.WeakMethod(self._begin), weakref.WeakMethod(self._end)
        hooks = (
            model.register_forward_pre_hook(lambda *call: _call(mine[0], call), with_kwargs=True),
            model.register_forward_hook(lambda *call: _call(mine[1], call), with_kwargs=True),
        )
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    @property
    def num_columns(self) -> int:
        """Of the batch so far, padding included; while the model is called, those before what it computes."""
        return self._ids.shape[1] if self._pending is None else self._pending.first

    @property
    def num_hit(self) -> int:
        """Tokens that the rows of the present batch found in the cache, added up."""
        return sum(sequence.num_hit for sequence in self._sequences)

    def reset(self) -> None:
        """End the present batch: it holds nothing any more, and stays cached while there is room."""
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
        # `generate` sets this before it asks how much of its text the cache has, and then cuts off as much,
        # whatever text that was. So the answer has to be: nothing yet; `_begin` finds the rest by the ids.
        self.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on as row `beam_idx[i]` was: a fork, which copies no K/V. int64 `[rows]`."""
        order = beam_idx.tolist()
        self._sequences = select(self.kv, self._sequences, order)
        self._padding = [self._padding[row] for row in order]
        self._ids = self._ids.index_select(0, beam_idx.to(self._ids.device))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows at `indices` go on."""
        self.reorder_cache(torch.arange(len(self._sequences))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row goes on as `repeats` rows."""
        self.reorder_cache(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Let go of the last tokens of every row; how many, as a negative number.

        Raises ValueError, also where a row has not as many beside its padding; nothing is cropped then.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding gives a tensor
        shortest = min((sequence.length for sequence in self._sequences), default=0)
        if not -shortest <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative one, of the "
                f"{shortest} that the shortest row has"
            )
        if tokens_to_remove:
            for sequence in self._sequences:
                self.kv.truncate(sequence, sequence.length + tokens_to_remove)
            self._ids = self._ids[:, :tokens_to_remove]

    def update_layer(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new K/V, and gather what its attention sees.

        keys, values: `[B, heads, T, dim]`. Returns both as `[B, heads, width, dim]`, valid until the next
        layer's.
        """
        if self._pending is None or not isinstance(self._pending.step, _GatheredStep):
            raise ValueError(
                "this cache serves calls of the whole model that it was made for, and no part of it"
            )
        source, slots, seen = self._pending.step
        pool, num_rows = self.kv.memory.pool, len(keys)
        for buffer, fresh in ((pool.k(layer_idx), keys), (pool.v(layer_idx), values)):
            tokens = fresh.detach().transpose(1, 2).flatten(0, 1)  # [B * T, heads, dim]
            buffer.index_copy_(0, slots, tokens.index_select(0, source))
        numel = len(seen) * pool.spec.width
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = keys.new_empty(
                numel + numel // 2
            )  # half as much again: texts grow by a token a step
        gathered = torch.index_select(
            pool.kv(layer_idx), 0, seen, out=self._scratch[:numel].view(len(seen), -1)
        ).view(num_rows, -1, pool.spec.width)
        all_keys, all_values = (part.transpose(1, 2) for part in pool.spec.split(gathered))
        return all_keys, all_values

    def _begin(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the model's forward pass: take slots for what it is to compute, and cut off the rest."""
        if kwargs.get("past_key_values") is not self:
            return None
        kwargs = {**kwargs, "input_ids": args[0]} if len(args) == 1 else dict(kwargs)
        input_ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        num_logits = kwargs.get("logits_to_keep", 0)
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
        num_logits = min(num_logits or num_new, num_new)
        padding = self._padding if self._sequences else _left_padding(mask, num_rows, num_new)
        self._require_own_columns(
            padding, mask if self._sequences else None, kwargs.get("position_ids"), num_new
        )
        if self._sequences:
            parts = [_Part(row, sequence.length, num_new) for row, sequence in enumerate(self._sequences)]
            same_as = list(range(num_rows))
            self.kv.extend(self._sequences, [num_new] * num_rows)
        else:
            self._padding = padding
            parts, same_as = self._open(input_ids.tolist(), num_logits)
        self._pending = _Pending(None, input_ids, self.num_columns, num_logits)
        if model.config.get_text_config()._attn_implementation == ATTENTION:
            step: PackedStep | _GatheredStep = self._step
            kwargs.update(self._pack(parts, same_as, input_ids, num_logits), lightkv=step, use_cache=False)
            del kwargs["past_key_values"]
            kwargs.pop("attention_mask", None)
            self._pending = self._pending._replace(step=step)
        else:
            step, first, changed = self._gather(parts, input_ids, width)
            kwargs.update(changed)
            self._pending = self._pending._replace(step=step, first=first)
        return (), kwargs

    def _require_own_columns(
        self, padding: list[int], mask: torch.Tensor | None, position_ids: Any, num_new: int
    ) -> None:
        """Raise ValueError for a mask, or positions, other than those that K/V found by its ids was made with.

        padding: of every row. mask: `[rows, columns]` of a batch that goes on. Waits for the device.
        """
        starts = np.array(padding)[:, None]
        columns = np.arange(self.num_columns + num_new)
        real = columns >= starts
        if self._sequences and mask is None and any(padding):
            raise ValueError(
                f"rows with {padding} columns of padding go on without a mask: pass it every time"
            )
        if mask is not None and ((mask != 0).cpu().numpy() != real).any():
            raise ValueError(
                f"a mask that is not that of the {padding} columns of padding which the rows began with: what "
                "has been computed is attended to; call reset(), and begin a text without what is to be hidden"
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

    def _end(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After it: what it computed is known now."""
        pending = self._pending
        if pending is None or (
            kwargs.get("past_key_values") is not self and kwargs.get("lightkv") is not self._step
        ):
            return None
        self._pending = None
        self.kv.confirm()
        self._ids = torch.cat((self._ids, pending.input_ids), 1) if len(self._ids) else pending.input_ids
        if isinstance(pending.step, PackedStep):
            output["logits"] = output.logits[0].unflatten(0, (-1, pending.num_logits))
            output["past_key_values"] = self
        return output

    def _open(self, texts: list[list[int]], num_logits: int) -> tuple[list[_Part], list[int]]:
        """A sequence for every row, those with the same text as forks of the first. Returns what is to be
        computed (what the cache has not, and the last `num_logits` tokens in any case), and for every row the
        first one with the same text."""
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
                # `open` leaves one token at least to be computed: of a prompt so short, as many as it takes.
                sequence = self.kv.open(text[: max(len(text) - num_logits + 1, 1)])
                sequences.append(sequence)
                parts.append(_Part(row, sequence.length, len(text) - sequence.length))
                self.kv.extend([sequence], [parts[-1].num_tokens])
                # So that later rows share what they have in common: in each layer it is written, then read.
                self.kv.publish(sequence)
        except BaseException:
            for sequence in sequences:
                self.kv.close(sequence, cache=False)
            self.kv.retract()
            raise
        self._sequences = sequences
        return parts, same_as

    def _pack(
        self, parts: list[_Part], same_as: list[int], input_ids: torch.Tensor, num_logits: int
    ) -> dict[str, torch.Tensor]:
        """The call for lightkv's attention: nothing but `parts`, one after the other."""
        _, starts, counts = (list(numbers) for numbers in zip(*parts, strict=True))
        rows = [self._sequences[part.row].row for part in parts]
        metadata = self._step.metadata
        metadata.prepare(rows, starts, counts, len(rows) if max(counts) > 1 else 0)
        ends = dict(zip((part.row for part in parts), np.cumsum(counts).tolist(), strict=True))
        length = {part.row: part.num_tokens for part in parts}
        wanted = [
            # Of padding, whose logits mean nothing, those of the first token.
            ends[first] - min(length[first], num_logits - idx)
            for first in same_as
            for idx in range(num_logits)
        ]
        source = self._sources(parts, self.num_columns, input_ids.shape[1])
        source_there, wanted_there = upload([source, np.array(wanted, dtype=np.int64)], input_ids.device)
        return {
            "input_ids": input_ids.flatten().index_select(0, source_there)[None],
            "position_ids": metadata.position_ids[None],
            "logits_to_keep": wanted_there,
        }

    def _gather(
        self, parts: list[_Part], input_ids: torch.Tensor, width: int
    ) -> tuple[_GatheredStep, int, dict[str, torch.Tensor]]:
        """The call for the model's own attention: all columns from the first that some row needs on."""
        first = min(self._padding[part.row] + part.start for part in parts)
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
        return (
            step,
            first,
            {
                "input_ids": input_ids[:, first - width :],
                "position_ids": positions_there.view(num_rows, -1),
            },
        )

    def _sources(self, parts: list[_Part], first: int, num_columns: int) -> np.ndarray:
        """Where the tokens of `parts` are in the flattened columns from `first` on: int64, packed."""
        starts = [row * num_columns + self._padding[row] + start - first for row, start, _ in parts]
        return np.concatenate(
            [np.arange(start, start + part.num_tokens) for start, part in zip(starts, parts, strict=True)]
        )


class _Layer(CacheLayerMixin):
    """One layer of a LightKVCache, as the model calls it."""

    is_croppable = True

    def __init__(self, cache: LightKVCache, layer_idx: int) -> None:
        super().__init__()
        self._cache = weakref.proxy(cache)
        self._layer_idx = layer_idx

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool stands from the start."""

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
    found = method()
    return None if found is None else found(*call)


def _left_padding(mask: torch.Tensor | None, num_rows: int, num_columns: int) -> list[int]:
    """How many columns of each row are padding. Raises ValueError where it is not on the left."""
    if mask is None:
        return [0] * num_rows
    real = (mask != 0).cpu().numpy()
    padding = num_columns - real.sum(1)
    if (padding == num_columns).any() or (real != (np.arange(num_columns) >= padding[:, None])).any():
        raise ValueError(
            "a row of padding alone, or padded elsewhere than on the left: pad the prompts there"
        )
    return padding.tolist()
