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
layer of every step, much as transformers' own cache copies K/V to grow. lightkv's attention, which reads the
pool, runs under `LLM` and `CachedModel`.

Padding is on the left and takes no slots. Positions do not count it, so a prompt is hit whatever its padding.

For an encoder-decoder (T5, BART, Whisper) `LightKVCache(model, capacity)` is an `EncoderDecoderCache`, whose
halves share one pool. The K/V of an encoder's output is written once, and held once for all beams of a request:

>>> from transformers import T5Config, T5ForConditionalGeneration
>>> config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
...                   decoder_start_token_id=0)
>>> model = T5ForConditionalGeneration(config).eval()
>>> cache = LightKVCache(model, capacity=200)
>>> output = model.generate(ids, past_key_values=cache, num_beams=4, max_new_tokens=6, do_sample=False)
>>> cache.num_encoder_tokens, cache.kv.num_held <= 4 + 4 * 6
(4, True)
>>> cache.reset()
>>> cache.kv.num_free
200
"""

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from lightkv.counts import checked_count
from lightkv.errors import OutOfRows
from lightkv.integrations.model.attention_call import ATTENTION
from lightkv.integrations.model.context import given_cache
from lightkv.integrations.model.probe import probe, require_no_states, require_plain_cache
from lightkv.integrations.model.token_positions import require_generated_positions
from lightkv.kv_cache import KVCache
from lightkv.memory.kv_gatherer import KVGatherer
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

from .batch_call import (
    GatheredStep,
    ModelCall,
    Part,
    gather_step,
    left_padding,
    require_own_columns,
    seen_by_rows,
)
from .cache_layers import KV, CacheLayer, CrossLayer, ReadableLayer, write_tokens
from .cached_model import assemble
from .cross_kv import CrossKV, EncoderOutput
from .encoder_decoder import probe_encoder_decoder
from .text_batch import TextBatch


class _Sizes(NamedTuple):
    """What a `LightKVCache` is made with."""

    capacity: int
    max_sequences: int
    max_entries: int | None
    kv_format: KVFormat


class _Pending(NamedTuple):
    """The call of the model that has begun and not ended, or has failed."""

    step: GatheredStep | None  # None while slots are allocated and the step is not made yet
    call: ModelCall
    first: int  # the first column that it computes


class LightKVCache(Cache):
    """K/V of up to `capacity` tokens for `model`, which stays as it is but for two hooks on its forward pass.

    Each `generate` begins a new text. The part of it that is cached, from any earlier call, is not computed
    again. Direct calls of the model continue the present batch until `reset`. A mask may hide the padding that
    a batch begins with, and nothing else. Positions may be given, but have to be those of the unpadded text.

    Layers that see a window or a chunk hold what they still see (`kv.ledger.groups`, `LayerGroups`), so that a
    text takes the less of the pool the longer it is: `capacity` counts tokens that every layer sees. `kv`
    counts slots, of which such a token takes one in each group. The tokens of one call of the model are held
    in all layers until the next call; `generate(prefill_chunk_size=…)` bounds that. `crop` goes back by the
    tokens of the last call and 64 more, or the window if that is shorter, and is refused beyond.

    `max_sequences` limits the rows of a batch, beams included, and `max_entries` the length of a text; the
    default is the model's context, or what layers that see everything have slots for. `kv` is the cache itself,
    with its counts, its map and `evict`.

    `kv_format` says how K and V are stored, as for `CachedModel`.

    Of an encoder-decoder the hooks are on its decoder, and the encoder stays as it is. The capacity counts the
    encoder's tokens, without their padding, and the decoder's. Rows beside each other with the same encoder
    output, such as the beams of a request, share its K/V. `max_entries` limits both texts; its default is the
    capacity. Nothing stays cached after `reset`, since only the same encoder output could hit it.

    Raises UnsupportedModel, OutOfMemory, and ValueError for a format that does not fit the model. A call of
    the model raises OutOfTokens, OutOfRows, SequenceTooLong, and ValueError for what cannot be cached.
    """

    def __new__(cls, model: PreTrainedModel, *_: Any, **__: Any) -> "LightKVCache":
        """Returns a cache of the kind that the model takes; an encoder-decoder tests for its type."""
        is_both = cls is LightKVCache and model.config.is_encoder_decoder
        return super().__new__(_EncoderDecoderKVCache if is_both else cls)

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        max_sequences: int = 16,
        max_entries: int | None = None,
        kv_format: KVFormat = AS_COMPUTED,
    ) -> None:
        self._make(model, _Sizes(capacity, max_sequences, max_entries, kv_format))

    def _make(self, model: PreTrainedModel, sizes: _Sizes) -> None:
        """Makes the cache of `model`, and of its layers."""
        require_generated_positions(model)
        shape = probe(model)
        require_no_states(model, shape)
        require_plain_cache(model, shape)
        shape = replace(shape, spec=replace(shape.spec, lifetimes=shape.lifetimes))
        kv, _ = assemble(model, shape, *sizes[:3], None, kv_format=sizes.kv_format)
        owner, spans = weakref.proxy(self), [one.size for one in shape.lifetimes]
        span = max(spans)  # of all sliding layers, since models make one mask for several layers
        layers: list[Any] = [CacheLayer(owner, idx, span if own else 0) for idx, own in enumerate(spans)]
        Cache.__init__(self, layers=layers)
        self._start(model, kv)

    def _start(self, module: nn.Module, kv: KVCache) -> None:
        """Sets the cache up without a batch, and puts its hooks on the forward pass of `module`."""
        self.kv = kv
        self._gatherer = KVGatherer(kv.memory.pool)
        self._batch = TextBatch(kv)
        self._pending: _Pending | None = None  # also after a call of the model that failed
        # The hooks hold weak references, so that an unused cache is freed and its hooks are removed.
        begin, end = weakref.WeakMethod(self._begin), weakref.WeakMethod(self._end)
        hooks = (
            module.register_forward_pre_hook(lambda *call: _call(begin, call), with_kwargs=True),
            module.register_forward_hook(lambda *call: _call(end, call), with_kwargs=True),
        )
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    @property
    def num_columns(self) -> int:
        """Columns of the batch so far, padding included; during a call of the model, those before the call."""
        return self._batch.ids.shape[1] if self._pending is None else self._pending.first

    @property
    def max_entries(self) -> int:
        """The most tokens of a text."""
        return self.kv.ledger.max_entries

    @property
    def num_encoder_tokens(self) -> int:
        """The encoder's tokens that the batch holds, shared ones counted once; 0 without an encoder."""
        return 0

    @property
    def num_hit(self) -> int:
        """The number of tokens that were cached when the present batch began, summed over its rows."""
        return sum(sequence.num_hit for sequence in self._batch.sequences)

    def reset(self) -> None:
        """Ends the present batch: its tokens are held no longer, and stay cached while there is room."""
        failed, self._pending = self._pending is not None, None
        self._batch.end(failed)

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
        self._batch.reorder(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Continues only the rows at `indices`."""
        self.reorder_cache(torch.arange(len(self._batch.sequences))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continues every row as `repeats` rows."""
        self.reorder_cache(torch.arange(len(self._batch.sequences)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every row; their number is given as a negative one.

        Raises ValueError for a number above 0, and where a row has fewer tokens without its padding or does not
        hold what the next one sees; then no row is cropped.
        """
        self._batch.crop(int(tokens_to_remove))  # assisted decoding passes a tensor

    def update_layer(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> KV:
        """Writes a layer's new K/V, and gathers the K/V that its attention sees, from the column `first` on.

        keys, values: `[B, heads, T, dim]`. Returns both as `[B, heads, width, dim]`, which stay valid until the
        next call.
        """
        if self._pending is None or self._pending.step is None:
            raise ValueError(
                "this cache works in calls of the whole model that it was made for, not in calls of its parts"
            )
        source, slots, seen = self._pending.step
        group = self.kv.memory.group_of_layer[layer_idx]
        write_tokens(self.kv.memory.pool, layer_idx, slots[group], source, (keys, values))
        return self._gather(layer_idx, seen[group, :, first:])

    def _gather(self, layer_idx: int, seen: torch.Tensor) -> KV:
        """Returns K and V at the slots `seen`, int64 `[rows, width]`, as `[rows, heads, width, dim]`."""
        k, v = self._gatherer.read(layer_idx, seen)
        return k.transpose(1, 2), v.transpose(1, 2)

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs before the model's forward pass: allocates slots, and cuts the call down to uncached tokens."""
        if given_cache(kwargs) is not self:
            return None
        if model.config._attn_implementation == ATTENTION:
            raise ValueError(
                f"{type(model).__name__} is bound to lightkv's attention, which runs under LLM and "
                'CachedModel: call model.set_attn_implementation("sdpa")'
            )
        call = self._read_call(args, kwargs)
        is_new = not self._batch.sequences
        parts = self._begin_batch(call) if is_new else self._batch.extend(call.input_ids.shape[1])
        self._pending = pending = _Pending(None, call, self.num_columns)
        step, first, positions = gather_step(self.kv.memory, self._batch.rows, parts, call, self.num_columns)
        kwargs = kwargs | {"input_ids": call.input_ids[:, first - self.num_columns :]}
        if self._takes_positions(kwargs):
            kwargs["position_ids"] = positions
        self._pending = pending._replace(step=step, first=first)
        return (), kwargs

    def _takes_positions(self, kwargs: dict[str, Any]) -> bool:
        """Returns whether the positions of the text without its padding are given to the model."""
        return True

    def _read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
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
        held_rows = len(self._batch.sequences)
        wrong_rows = held_rows and num_rows != held_rows
        shape = None if mask is None else tuple(getattr(mask, "shape", ()))
        if not num_new or wrong_rows or shape not in (None, (num_rows, width)):
            raise ValueError(
                f"{num_new} tokens of {num_rows} rows and a mask of {shape}, after {self.num_columns} tokens "
                f"of {held_rows} rows: call reset() before another text"
            )
        padding = self._batch.padding if held_rows else left_padding(mask, num_rows, num_new)
        continued = mask if held_rows else None
        require_own_columns(padding, self.num_columns, num_new, continued, kwargs.get("position_ids"))
        return ModelCall(input_ids, padding, min(num_logits or num_new, num_new))

    def _begin_batch(self, call: ModelCall) -> list[Part]:
        """Opens the rows of a batch that begins. Returns what `TextBatch.begin` returns."""
        kinds = [None] * len(call.padding)  # rows share K/V wherever their texts agree
        return self._batch.begin(call, kinds, lambda _, prompt: self.kv.open(prompt))

    def _end(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Runs after the model's forward pass: records what it computed."""
        if self._pending is not None and given_cache(kwargs) is self:
            pending, self._pending = self._pending, None
            self._batch.confirm(pending.call.input_ids)


class _EncoderDecoderKVCache(LightKVCache, EncoderDecoderCache):
    """The LightKVCache of an encoder-decoder: the decoder's K/V, and in the same pool what it reads of the
    encoder's output."""

    def _make(self, model: PreTrainedModel, sizes: _Sizes) -> None:
        capacity = checked_count("capacity", sizes.capacity)
        self._max_rows = checked_count("rows", sizes.max_sequences)
        spec = probe_encoder_decoder(model, sizes.kv_format)
        # Every row may read an encoder output of its own, which takes a row of the table, too.
        entries = capacity if sizes.max_entries is None else sizes.max_entries
        kv = KVCache(spec, capacity, 2 * self._max_rows, entries, model.device)
        self._cross: CrossKV | None = None
        self._output: EncoderOutput | None = None  # of the call of the model that begins a batch
        self._gathered: tuple[tuple[int, int], KV] | None = None  # by its layer, and the count of reads then
        owner, layers = weakref.proxy(self), range(spec.num_layers)
        own = Cache(layers=[ReadableLayer(owner, layer_idx) for layer_idx in layers])
        cross = Cache(layers=[CrossLayer(owner, layer_idx) for layer_idx in layers])
        self._start(model.get_decoder(), kv)
        EncoderDecoderCache.__init__(self, own, cross)

    @property
    def num_encoder_tokens(self) -> int:
        return 0 if self._cross is None else self._cross.num_tokens

    @property
    def encoder_width(self) -> int:
        """Columns of the encoder's output, padding included; 0 while there is none."""
        return 0 if self._cross is None else self._cross.width

    def reset(self) -> None:
        super().reset()
        self._cross = self._output = self._gathered = None
        self.is_updated = dict.fromkeys(self.is_updated, False)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if len(beam_idx) > self._max_rows:
            raise OutOfRows(self._max_rows)
        super().reorder_cache(beam_idx)
        if self._cross is not None:
            self._cross.reorder(beam_idx.tolist())

    def update_cross(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes a layer's K/V of the encoder's output, `[B, heads, columns, dim]`, once for each request."""
        if self._cross is None or self._pending is None:
            raise ValueError(
                "the K/V of an encoder's output outside a call of the decoder: call the whole model"
            )
        self._cross.write(layer_idx, keys, values)

    def read_layer(self, layer_idx: int) -> KV:
        """Returns a copy of a layer's K/V of the decoder's text, `[B, heads, columns, dim]`."""
        batch = self._batch
        seen = seen_by_rows(self.kv.memory.table, batch.rows, batch.padding, self.num_columns)
        k, v = self._gather(layer_idx, seen)
        return k.clone(), v.clone()

    def read_cross(self, layer_idx: int) -> KV:
        """Returns a layer's K/V of the encoder's output, `[B, heads, columns, dim]`; a copy between two calls
        of the model, and in one valid until the next layer."""
        if self._cross is None:
            raise ValueError("there is no encoder output: the batch has not begun, or has been reset")
        place = layer_idx, self._gatherer.num_reads
        if self._gathered is None or self._gathered[0] != place:  # K first, then V
            shared, num_rows = self._gather(layer_idx, self._cross.seen()), len(self._cross.which)
            k, v = (part.expand(num_rows, -1, -1, -1) for part in shared)
            if self._pending is None:
                return k.clone(), v.clone()
            self._gathered = (layer_idx, self._gatherer.num_reads), (k, v)
        return self._gathered[1]

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if given_cache(kwargs) is self:
            self._output = EncoderOutput.of_call(kwargs, self._cross)
            # Some decoders hand the cache on to their layers only so.
            kwargs = kwargs | {"use_cache": True}
        return super()._begin(model, args, kwargs)

    def _takes_positions(self, kwargs: dict[str, Any]) -> bool:
        return kwargs.get("position_ids") is not None

    def _begin_batch(self, call: ModelCall) -> list[Part]:
        if len(call.padding) > self._max_rows:
            raise OutOfRows(self._max_rows)
        assert self._output is not None
        cross = CrossKV(self.kv, self._output)
        # Rows share K/V where their encoder output is the same, too. Some decoders count padding in their
        # positions.
        kinds = list(zip(cross.which, call.padding, strict=True))
        with ExitStack() as undo:
            undo.callback(cross.release)  # from then on its readers hold it; without any, it is freed
            begun = self._batch.begin(
                call,
                kinds,
                lambda row, prompt: self.kv.open_reader(prompt, cross.sequence(row), (call.padding[row],)),
            )
            self._cross = cross
            return begun


def _call(method: weakref.WeakMethod[Any], call: tuple[Any, ...]) -> Any:
    """Calls a hook whose cache may have been freed."""
    found = method()
    return None if found is None else found(*call)
