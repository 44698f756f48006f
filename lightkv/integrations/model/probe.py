"""Finds out what a Hugging Face model computes as attention (`model_shape.find_shape`), and whether lightkv
computes the same, by running it a few times over a few tokens.

A model is refused, with the reason, where what it computes for a token depends on the token's place in the
batch, or where an adapted model's attention differs from its own.
"""

import inspect
from typing import Any, NoReturn, cast

import torch
from transformers import PreTrainedModel

from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.adapters.proof import require_own_attention
from lightkv.integrations.model.adapters.selected_logits import selects_logits
from lightkv.integrations.model.mixers.mixer import Mixer, require_own_mixers

from .attention_call import AttentionCall, compute, kept_handler
from .context import cache_name, context_length, num_layers
from .model_shape import ModelShape, NeedsNumbers, Past, RecordingLayer, find_shape, probed
from .token_positions import counting_embeddings, counts_itself

__all__ = ["ModelShape", "NeedsNumbers", "find_shape", "probe", "require_no_states", "require_plain_cache"]

_FORWARD_ARGUMENTS = frozenset({"position_ids", "logits_to_keep"})  # of a model, beside input_ids
_NUM_TOKENS = 8  # in each of the passes that are compared
_MIN_TOLERANCE = 2.0**-11  # for dtypes with less rounding: a deep model adds up many sums
# The order of the tokens in the packed pass: each has other neighbours and another place than in its text.
_ORDER = (5, 2, 7, 0, 3, 6, 1, 4)


def probe(model: PreTrainedModel) -> ModelShape:
    """Returns what `model` computes as attention; the model stays as it was.

    The model runs once over three tokens, to record how it calls its attention, and five times over eight, to
    compare q, k, v and logits of packed tokens in any order with those of a pass of their own. A model on the
    meta device, which has no numbers, runs once and is not compared.

    Raises UnsupportedModel for everything that lightkv would not compute exactly, and for a model that cannot
    be called as `compute` calls it.
    """
    architecture = type(model).__name__
    kept = kept_handler(model)
    owns_attention = kept is not None and kept.owns_attention
    # A call would not fail: the model may accept the arguments as **kwargs, and ignore them.
    is_given = owns_attention or counting_embeddings(model)
    needed = _FORWARD_ARGUMENTS - ({"position_ids"} if is_given else set())
    needed -= {"logits_to_keep"} if selects_logits(model) else set()
    if missing := needed - inspect.signature(type(model).forward).parameters.keys():
        raise UnsupportedModel(architecture, f"its forward pass takes no {' and no '.join(sorted(missing))}")
    shape = find_shape(model)
    if model.device.type != "meta":
        _require_packable(model, shape)
        require_own_mixers(model)
        if kept is not None and owns_attention:
            widest = max(layer.options.most_keys or 0 for layer in shape.layers)
            context = context_length(model.config.get_text_config()) or 512
            ids = _varied_ids(model, min(max(24, widest + 8), 512, context))  # past the windows, if short
            with probed(model):
                require_own_attention(model, kept, shape.layers, ids)
    return shape


class _Projections:
    """An AttentionHandler that keeps q, k and v of every layer, and returns each token's own v.

    So the layers after it depend on what a layer computes for a token, and no token depends on another.
    """

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []  # q, k and v of each layer, each [T, heads * dim]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        call = call.rotated()
        q, v = call.q, call.v
        self.found += [heads[0].transpose(0, 1).flatten(1) for heads in (q, call.k, v)]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2).contiguous()

    def mix(self, mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
        return x


def require_no_states(model: PreTrainedModel, shape: ModelShape) -> None:
    """Raises UnsupportedModel if layers of the model keep states, of which only K/V has a place."""
    if shape.spec.states:
        reason = "its layers keep states beside K/V, which LLM and the service have room for"
        raise UnsupportedModel(type(model).__name__, reason)


def require_plain_cache(model: PreTrainedModel, shape: ModelShape) -> None:
    """Raises UnsupportedModel if a layer of the model caches anything but the K and V that it attends to."""
    spec, ids = shape.spec, torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    past = Past(spec.num_layers, 0)
    with probed(model):
        model(input_ids=ids, use_cache=True, lightkv=_Projections(), **{cache_name(model): past})
    for idx, layer in enumerate(past.layers):
        num_kv_heads, *dims = spec.heads(idx)
        # A layer that reads another one's K/V may cache nothing.
        expected = [(1, num_kv_heads, 1, dim) for dim in dims] if spec.holder(idx) == idx else []
        found = [tuple(given.shape) for kv in cast(RecordingLayer, layer).calls[-1:] for given in kv]
        if found != expected:
            reason = f"layer {idx} caches {found} a token, where its attention takes K and V as {expected}"
            raise UnsupportedModel(type(model).__name__, reason)


def _require_packable(model: PreTrainedModel, shape: ModelShape) -> None:
    """Raises UnsupportedModel if q, k, v or logits of a token depend on its place in the packed batch."""
    text = model.config.get_text_config()
    context = context_length(text)
    num_tokens = _NUM_TOKENS if context is None else min(_NUM_TOKENS, context)
    ids = _varied_ids(model, num_tokens)
    positions = wanted = torch.arange(num_tokens, device=ids.device)
    # Some models would take a part of their mask where a number says which logits are computed, so it is a
    # tensor: `wanted`.
    order = torch.tensor([token for token in _ORDER if token < num_tokens], device=ids.device)
    # The first position of the tokens, if the last one ends the context.
    far = (context or num_tokens) - num_tokens

    # Both return q, k and v of each layer, then the logits, each `[T, n]`.
    def packed(positions: torch.Tensor) -> list[torch.Tensor]:
        """Computes the tokens in `order`, and returns the results in the order of `ids`."""
        projections = _Projections()
        logits = compute(model, ids[order], positions[order], projections, wanted)
        return [part[order.argsort()] for part in (*projections.found, logits)]

    def own(**arguments: Any) -> list[torch.Tensor]:
        """Computes the tokens as one text, in the way in which the model is usually called."""
        projections = _Projections()
        output = model(input_ids=ids[None], logits_to_keep=wanted, lightkv=projections, **arguments)
        return [*projections.found, output.logits[0]]

    def refuse(difference: str, what: str) -> NoReturn:
        raise UnsupportedModel(type(model).__name__, f"{what} ({difference})")

    with probed(model):
        given = own(position_ids=positions[None], use_cache=False)
        if difference := _difference(given, own(use_cache=False)):
            refuse(difference, "it does not count a text's positions from 0")
        if difference := _difference(given, packed(positions)):
            refuse(difference, "what it computes of a token depends on the token's place in the batch")
        if far:
            # The model's own count shows whether fix_positions changes those that are given as it has to.
            far_ids = None if counts_itself(model) else (positions + far)[None]
            past = Past(num_layers(text) or 0, far)
            uses = shape.numbers is None  # MiniMax, which keeps states, uses no cache but its own
            there = own(position_ids=far_ids, use_cache=uses, **{cache_name(model): past})
            if difference := _difference(there, packed(positions + far)):
                what = f"what it computes of a token after {far} others depends on more than its position"
                refuse(difference, what)


def _difference(found: list[torch.Tensor], other: list[torch.Tensor]) -> str | None:
    """Describes the first difference that is more than rounding. Returns None if there is none."""
    if len(found) != len(other):
        return f"{len(found)} and {len(other)} tensors"
    for idx, (ours, theirs) in enumerate(zip(found, other, strict=True)):
        error = _relative_error(ours, theirs)
        if error > max(4 * torch.finfo(ours.dtype).eps, _MIN_TOLERANCE):
            name = f"{'qkv'[idx % 3]} of layer {idx // 3}" if idx + 1 < len(found) else "the logits"
            return f"{name} differ by {error:.2g} of the largest"
    return None


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns the median, over tokens, of a token's largest difference relative to its largest number.

    A matrix product may round differently when other rows are computed with it, which can route a token to
    another expert; the median ignores single tokens. A real dependence on the order changes more than half of
    them.
    """
    ours, theirs = (torch.nan_to_num(x.float()) for x in (ours, theirs))
    largest = theirs.abs().amax(1).clamp(min=1e-30)
    return float(((ours - theirs).abs().amax(1) / largest).median())


def _varied_ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Returns `count` ids, int64, spread over the vocabulary, without padding, which some models skip."""
    text = model.config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    ids = [(idx + 1) * text.vocab_size // (count + 1) for idx in range(count)]
    ids = [token - 1 if token == padding and token else token for token in ids]
    return torch.tensor(ids).to(model.device)
