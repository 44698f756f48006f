"""A Hugging Face model and the cache of its K/V: token ids of sequences go in, logits come out.

It is for decoding in other ways than `LLM` does (`streaming`, `prompt_lookup` …), and for loops of your own:

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.cached_model import CachedModel
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2)
>>> lm = CachedModel(LlamaForCausalLM(config).eval(), capacity=100)
>>> sequence, logits = lm.prefill([5, 6, 7, 8])
>>> ids = []
>>> for _ in range(3):
...     ids.append(int(logits.argmax()))
...     (logits,) = lm.decode([sequence], ids[-1:])
>>> lm.cache.close(sequence, ids)
>>> lm.cache.num_cached, lm.cache.num_free
(7, 93)
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from lightkv.attention import AttentionBackend, Batch, Rotary, Step, make_backends
from lightkv.attention.forms.gaps import with_gaps
from lightkv.attention.forms.rings import over_rings
from lightkv.counts import checked_count
from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.attention_call import compute
from lightkv.integrations.model.context import context_length
from lightkv.integrations.model.exact_rotary import find_rotary, make_exact
from lightkv.integrations.model.hf_model import PackedStep, bind
from lightkv.integrations.model.model_shape import ModelShape
from lightkv.integrations.model.probe import probe, require_no_states
from lightkv.integrations.model.ring_graph import RingGraph
from lightkv.kv_cache import KVCache
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.sequence import Sequence
from lightkv.memory.staging import upload
from lightkv.token_ids import TokenIds, int32_bytes
from lightkv.triton_kernels.attention.variants.tree import TreeMask
from lightkv.triton_kernels.attention.variants.window import Window
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

from .guess_tree import GuessTree


class CachedModel:
    """A model bound to lightkv's attention, and a `KVCache` of `capacity` tokens that only this model writes.

    `max_sequences` limits how many sequences may be open at once, `max_entries` how many tokens each may hold;
    the default is the model's context, or the capacity if that is smaller. `backend` names the attention
    backend; the default depends on the device. `exact_positions` makes the model compute rotary angles in
    float64 from now on, which sinks and texts past the model's context need. Tokens may be dropped
    (`cache.release`, `cache.keep`): the others keep their positions, and new tokens count on from the last one.
    `kv_format` says how K and V are stored; static scales are to be set with `set_kv_scales` before the first
    step, which raises ValueError otherwise.

    Raises UnsupportedModel, with `exact_positions` also for positions that are not rotary in NeoX's layout and
    for layers with windows or chunks; UnknownBackend, OutOfMemory, and ValueError for a format that does
    not fit the model. The model is then as it was.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        max_sequences: int = 16,
        max_entries: int | None = None,
        backend: str | None = None,
        exact_positions: bool = False,
        kv_format: KVFormat = AS_COMPUTED,
    ) -> None:
        shape = probe(model)
        # A chunk bounds what a layer attends to as a window does.
        self.windows = sorted({most for layer in shape.layers if (most := layer.options.most_keys)})
        # The most tokens that any layer sees, if all have windows.
        windows = [layer.options.of(Window) for layer in shape.layers]
        self._widest = max((one.size for one in windows if one is not None), default=0) if all(windows) else 0
        self._ring_graphs: dict[tuple[Ring, int], RingGraph] = {}
        if exact_positions and self.windows:
            reason = (
                f"its layers have windows or chunks of their own ({self.windows}), which count positions, not "
                "entries"
            )
            raise UnsupportedModel(type(model).__name__, reason)
        rotary = find_rotary(model) if exact_positions else None
        self.model = model
        self.context = context_length(model.config.get_text_config()) or capacity
        self.exact_positions = exact_positions
        self.cache, self.backends = assemble(
            model, shape, capacity, max_sequences, max_entries, backend, rotary, kv_format
        )
        bind(model)
        if rotary is not None:
            make_exact(model, rotary)

    @torch.no_grad()
    def prefill(self, prompt: TokenIds) -> tuple[Sequence, torch.Tensor]:
        """Opens a sequence, and computes the part of its prompt that is not cached, for others to hit.

        Returns the sequence and the logits of the next token, `[vocabulary]`. Raises the errors of
        `KVCache.open` and `extend`; no sequence is open then.
        """
        ids = int32_bytes(prompt)
        sequence = self.cache.open(ids)
        try:
            (logits,) = self.forward([sequence], [ids[TOKEN_BYTES * sequence.length :]])
        except BaseException:
            self.cache.close(sequence)
            raise
        self.cache.publish(sequence)
        self.cache.confirm()
        return sequence, logits

    @torch.no_grad()
    def decode(self, sequences: Seq[Sequence], token_ids: Seq[int]) -> torch.Tensor:
        """Computes one more token of each sequence. Returns the next logits, `[len(sequences), vocabulary]`."""
        return self.forward(sequences, [[token] for token in token_ids])

    @torch.no_grad()
    def forward(
        self,
        sequences: Seq[Sequence],
        token_ids: Seq[TokenIds],
        all_logits: bool = False,
        tree: GuessTree | None = None,
    ) -> torch.Tensor:
        """Computes `token_ids[i]` at the end of `sequences[i]`, for all sequences in one call of the model.

        Returns the logits after the last token of each sequence, `[len(sequences), vocabulary]`, or with
        `all_logits` those after every token, packed in order. With a `tree`, the tokens are its nodes, at the
        end of one sequence, and each attends to its ancestors alone; `take` keeps those that were right. Raises
        the errors of `KVCache.extend`, and ValueError where tokens were dropped and this model, or these
        sequences together, would not be computed right. After an error the sequences are as before.
        """
        ids = [np.frombuffer(int32_bytes(one), dtype=np.int32) for one in token_ids]
        counts = [len(one) for one in ids]
        ring = self._ring_of(sequences)
        if ring is not None and tree is not None:
            raise ValueError(
                f"guesses in {ring}: their slots could not be given back; use a row that is no ring"
            )
        if ring is None:
            self._check_gaps(sequences)
        starts = [one.length if ring is None else one.position for one in sequences]
        self.cache.extend(sequences, counts)
        try:
            rows, dropped = [one.row for one in sequences], [one.dropped for one in sequences]
            packed = np.concatenate(ids).astype(np.int64)
            num_prefills = len(rows) if max(counts) > 1 else 0
            if ring is not None and not num_prefills and self._captures_rings:
                key = ring, len(rows)
                if key not in self._ring_graphs:
                    self._ring_graphs[key] = RingGraph(self.model, self.cache.memory, self.backends, *key)
                return self._ring_graphs[key].replay(sequences, starts, packed).clone()
            batch, mask = Batch.of(rows, starts, counts, num_prefills), None
            held = with_gaps(batch, dropped) if ring is None else over_rings(batch, ring)
            if tree is not None:
                mask = TreeMask(torch.from_numpy(tree.bits()).to(self.model.device))
                first = starts[0] + dropped[0]
                held = held.at_positions([first + depth for depth in tree.depths])
            step = Step.of(held, self.cache.memory, mask=mask)
            last = np.cumsum(np.array(counts, dtype=np.int64)) - 1
            input_ids, wanted = upload([packed, last], self.model.device)
            index = None if all_logits else wanted
            return compute(self.model, input_ids, step.position_ids, PackedStep(step, self.backends), index)
        except BaseException:
            self.cache.shrink(sequences, counts)
            raise

    @property
    def _captures_rings(self) -> bool:
        return self.cache.memory.device.type == "cuda" and all(
            backend.supports_cuda_graph for backend in self.backends
        )

    def _ring_of(self, sequences: Seq[Sequence]) -> Ring | None:
        """Returns what kind of ring all sequences of a step are; None where none is one.

        Raises ValueError for a step of several kinds, and for a ring that this model's layers cannot have.
        """
        rings = {one.ring for one in sequences}
        ring, *others = rings or {None}
        if others:
            raise ValueError(
                f"sequences of {ring} and {others} cannot share a step: run each kind in a step of its own"
            )
        if ring is None:
            return None
        if self.windows and (ring.sinks or not 0 < self._widest <= ring.least_held):
            raise ValueError(
                f"{ring} for a model whose layers have windows or chunks of their own ({self.windows}): each "
                f"has to have a window, and a ring no sinks and at least size - stride + 1 tokens of the widest"
            )
        layer_format = self.cache.memory.pool.spec.format
        if ring.sinks and layer_format.elements.has_hadamard:
            raise ValueError(
                f"{ring} with sinks over {layer_format}, whose keys were multiplied by a Hadamard matrix: "
                "store K/V as int8 or int8-gN, or have a ring without sinks"
            )
        if ring.sinks and not self.exact_positions:
            raise ValueError(
                f"{ring.sinks} sinks need queries rotated to other positions: make the CachedModel with "
                "exact_positions=True"
            )
        return ring

    @torch.no_grad()
    def take(self, sequence: Sequence, start: int, path: Seq[int]) -> None:
        """Keeps the nodes `path` of a tree whose root is at entry `start`, and drops the others: the K/V of a
        node at another entry than its depth is copied there. Raises the errors of `KVCache.truncate`."""
        first = next((depth for depth, node in enumerate(path) if node != depth), len(path))
        if first < len(path):
            slots, memory = self.cache.slots(sequence).long(), self.cache.memory
            (nodes,) = upload([np.array(path[first:], dtype=np.int64)], self.model.device)
            for rows in memory.pool.buffers:
                rows.index_copy_(0, slots[start + first : start + len(path)], rows[slots[start + nodes]])
        self.cache.truncate(sequence, start + len(path))

    def _check_gaps(self, sequences: Seq[Sequence]) -> None:
        """Raises ValueError for a sequence that has dropped tokens as this model cannot compute it."""
        for one in sequences:
            if one.dropped and self.windows:
                raise ValueError(
                    f"{one} has dropped tokens, but this model's layers have windows or chunks of their own "
                    f"({self.windows}), which count positions, not entries: close it, and run its text again"
                )
            if one.gap.start:
                raise ValueError(
                    f"{one} has dropped tokens after {one.gap.start} sinks, and a model attends to sinks over "
                    "rings alone: run its text as a Stream"
                )


def assemble(
    model: PreTrainedModel,
    shape: ModelShape,
    capacity: int,
    max_sequences: int,
    max_entries: int | None,
    backend: str | None,
    rotary: Rotary | None = None,
    kv_format: KVFormat = AS_COMPUTED,
) -> tuple[KVCache, list[AttentionBackend]]:
    """Returns a cache for the K/V of `model`, of the shape that `probe` found, and the backends of its layers.

    The arguments are those of `CachedModel`; where the spec has lifetimes of layers, the cache has the slots of
    `capacity` tokens that every layer sees. The model does not change. Raises UnknownBackend, OutOfMemory,
    UnsupportedModel and ValueError.
    """
    require_no_states(model, shape)
    capacity = checked_count("capacity", capacity)
    backends = make_backends(backend, model.device, shape.layers, rotary)
    spec = replace(shape.spec, format=kv_format)
    for layer in backends:
        layer.check_format(spec.format_of(layer.layer_idx))
    context = context_length(model.config.get_text_config()) or capacity
    num_slots = capacity * spec.groups.num_groups
    max_entries = max_entries or min(num_slots // spec.groups.widths[0], context)
    cache = KVCache(spec, num_slots, max_sequences, max_entries, model.device)
    return cache, backends
