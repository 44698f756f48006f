"""What a Hugging Face model computes as attention, found by running it a few times over a few tokens.

A model is refused here, with the reason, where lightkv would not compute exactly what the model computes by
itself: because of what its attention takes, or because what it computes of a token depends on where the token
stands in the batch. Knows transformers' interfaces and no model by name.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ..attention import AttentionOptions, LayerShape
from ..errors import LightKVError, UnsupportedModel
from ..kv_spec import KVSpec
from .context import context_length
from .transformers import compute, fix_rotary, switch_attention, undo_binding

PROBE = (
    "lightkv_probe"  # lightkv's attention function, with a mask that says what the model would have masked
)

# Arguments of an attention call that change nothing here: dropout is off, positions are applied to q and k.
_HARMLESS = frozenset({"dropout", "position_ids", "cache_position", "use_cache"})
_FORWARD_ARGUMENTS = frozenset({"position_ids", "logits_to_keep"})  # of a model, beside input_ids
_FAR = 1 << 20  # a query position past any window or chunk, from which the probe looks at a mask
_NUM_TOKENS = 8  # in each pass that is compared
# The order of these tokens in the packed pass: none has the neighbours, or the place, of its own pass.
_ORDER = (5, 2, 7, 0, 3, 6, 1, 4)


@dataclass(frozen=True)
class ModelShape:
    """What `probe` found: the K/V of one token, and every layer's attention."""

    spec: KVSpec
    layers: tuple[LayerShape, ...]


def probe(model: PreTrainedModel) -> ModelShape:
    """What `model` computes as attention; the model stays as it was.

    The model runs once over three tokens, to see how it calls its attention, and four times over eight, to see
    whether tokens that are packed in any order have the q, k, v and logits that they have in a pass of their
    own. A model on the meta device, which has no numbers, runs once, and is not compared.

    Raises UnsupportedModel for whatever lightkv would not compute exactly, and for a model that cannot be
    called as `compute` calls it.
    """
    architecture = type(model).__name__
    # By its signature: a **kwargs would swallow what the model does not know.
    if missing := _FORWARD_ARGUMENTS - inspect.signature(type(model).forward).parameters.keys():
        raise UnsupportedModel(architecture, f"its forward pass takes no {' and no '.join(sorted(missing))}")
    shape = _find_shape(model)
    if model.device.type != "meta":
        _require_packable(model, shape)
    return shape


# --------------------------------------------------------------------------------
# How the model calls its attention


@dataclass(frozen=True)
class _MaskRule:
    """What a layer gets as its mask under the probe: the rule itself, to be asked at any position."""

    visible: Any  # (batch, head, query position, key position) → bool tensor

    def sees(self, query: int, keys: list[int], device: torch.device) -> list[bool]:
        """Which `keys` a query at position `query` may attend."""
        zero = torch.zeros((), dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        return [bool(self.visible(zero, zero, zero + query, zero + key)) for key in keys]


class _Recorder:
    """Takes the calls of a forward pass, and answers with zeros: only their form matters."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.layers: dict[int, LayerShape] = {}
        self.dtypes: set[torch.dtype] = set()

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        idx = getattr(module, "layer_idx", None)
        if not isinstance(idx, int):
            raise self._unsupported(f"{type(module).__name__} does not say which layer it is")
        if idx in self.layers:
            raise self._unsupported(f"layer {idx} attends more than once")
        options = self._options(module, mask, dict(arguments), v.shape[-1], q.device)
        if k.shape[:-1] != v.shape[:-1] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
            raise self._unsupported(f"layer {idx} attends q {q.shape}, k {k.shape}, v {v.shape}")
        self.layers[idx] = LayerShape(q.shape[1], q.shape[-1], k.shape[1], options)
        self.dtypes |= {k.dtype, v.dtype}
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])

    def _options(
        self, module: torch.nn.Module, mask: Any, arguments: dict[str, Any], v_dim: int, device: torch.device
    ) -> AttentionOptions:
        scale = arguments.pop("scaling", None)
        window = arguments.pop("sliding_window", None) or 0
        softcap = arguments.pop("softcap", None) or 0.0
        causal = arguments.pop("is_causal", None)
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if not causal:
            raise self._unsupported("its attention is not causal")
        given = {name for name, value in arguments.items() if not isinstance(value, bool | None)}
        if unknown := given - _HARMLESS:
            raise self._unsupported(f"its attention takes {', '.join(sorted(unknown))}, unknown here")
        if isinstance(mask, _MaskRule):
            first = _FAR - window + 1 if window else 0
            keys = [*([first - 1] if window else []), first, (first + _FAR) // 2, _FAR, _FAR + 1]
            expected = [*([False] if window else []), True, True, True, False]
            if mask.sees(_FAR, keys, device) != expected:
                raise self._unsupported("its mask is neither causal nor the sliding window it names")
        elif mask is not None:
            raise self._unsupported("it makes an attention mask of its own")
        return AttentionOptions(scale, int(window), float(softcap), v_dim)

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(self.architecture, reason)


def _find_shape(model: PreTrainedModel) -> ModelShape:
    """What `probe` returns, from one pass. Raises UnsupportedModel."""
    architecture = type(model).__name__
    recorder = _Recorder(architecture)
    text = model.config.get_text_config()
    positions = torch.arange(3, device=model.device)
    with _probed(model):
        output = model(
            input_ids=torch.zeros_like(positions)[None],
            position_ids=positions[None],
            # Without one, transformers looks for packed texts in the positions, which the meta device has not.
            past_key_values=_Past(text.num_hidden_layers, 0) if model.device.type == "meta" else None,
            use_cache=False,
            logits_to_keep=positions[::2],  # neither all nor one: a model that knows only a count fails
            lightkv=recorder,
        )
        logits_shape = tuple(output.logits.shape)
    if logits_shape != (1, 2, text.vocab_size):
        reason = f"asked for the logits of 2 tokens of {text.vocab_size}, it returns them as {logits_shape}"
        raise UnsupportedModel(architecture, reason)
    num_layers = text.num_hidden_layers
    if sorted(recorder.layers) != list(range(num_layers)):
        reason = f"of {num_layers} layers, {len(recorder.layers)} call the attention interface"
        raise UnsupportedModel(architecture, reason)
    layers = tuple(recorder.layers[idx] for idx in range(num_layers))
    shapes = {(layer.num_kv_heads, layer.head_dim, cast(int, layer.options.v_dim)) for layer in layers}
    if len(shapes) > 1 or len(recorder.dtypes) > 1:
        reason = f"its layers' K/V differ: (KV heads, K dim, V dim) {sorted(shapes)}, {recorder.dtypes}"
        raise UnsupportedModel(architecture, reason)
    (shape,), (dtype,) = shapes, recorder.dtypes
    return ModelShape(KVSpec(num_layers, *shape, dtype), layers)


@contextmanager
def _probed(model: PreTrainedModel) -> Iterator[None]:
    """`model` on the probe's attention, for as long as the block runs.

    Raises UnsupportedModel, also in place of what the model itself raises, which can be anything.
    """
    undo = undo_binding(model)
    AttentionMaskInterface.register(PROBE, _mask_rule)
    switch_attention(model, PROBE)
    try:
        fix_rotary(model)
        with torch.no_grad():
            yield
    except (LightKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedModel(
            type(model).__name__, f"its forward pass fails when probed ({said})"
        ) from error
    finally:
        undo()


def _mask_rule(*, mask_function: Any, **_: Any) -> _MaskRule:
    """transformers' mask function."""
    return _MaskRule(mask_function)


# --------------------------------------------------------------------------------
# Whether a token is computed the same wherever it stands


class _PastLayer(CacheLayerMixin):
    """A layer of `_Past`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1


class _Past(Cache):
    """Says that `length` tokens are cached, and gives the K/V of new ones back as they came."""

    def __init__(self, num_layers: int, length: int) -> None:
        super().__init__(layers=[_PastLayer(length) for _ in range(num_layers)])


class _Projections:
    """Keeps q, k and v of every layer, and answers with each token's own v.

    So what a layer computes of a token shows in the layers after it, and no token depends on another.
    """

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []  # of each layer q, k and v, each [T, heads * dim]

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        self.found += [heads[0].transpose(0, 1).flatten(1) for heads in (q, k, v)]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2)


def _require_packable(model: PreTrainedModel, shape: ModelShape) -> None:
    """Raises UnsupportedModel where a token's q, k, v or logits depend on its place among those packed."""
    text = model.config.get_text_config()
    context = context_length(text)
    num_tokens = _NUM_TOKENS if context is None else min(_NUM_TOKENS, context)
    order = [token for token in _ORDER if token < num_tokens]
    ids = _varied_ids(text.vocab_size, num_tokens, text.pad_token_id).to(model.device)
    start = (context or num_tokens) - num_tokens  # of the pass far into a text
    with _probed(model):
        # As the model counts by itself: some count from another number than 0.
        own = _Projections()
        logits = model(input_ids=ids[None], use_cache=False, lightkv=own).logits[0]
        _compare(model, shape, "at the beginning of a text", ids, 0, order, own, logits)
        if start:
            own = _Projections()
            logits = model(
                input_ids=ids[None],
                position_ids=torch.arange(start, start + num_tokens, device=ids.device)[None],
                past_key_values=_Past(shape.spec.num_layers, start),
                use_cache=True,
                lightkv=own,
            ).logits[0]
            _compare(model, shape, f"after {start} others", ids, start, order, own, logits)


def _compare(
    model: PreTrainedModel,
    shape: ModelShape,
    where: str,
    ids: torch.Tensor,
    start: int,
    order: list[int],
    own: _Projections,
    logits: torch.Tensor,
) -> None:
    """Compare a pass that has recorded `own` and `logits` with one over the same tokens in another order."""
    moved = torch.tensor(order, device=ids.device)
    packed = _Projections()
    packed_logits = compute(model, ids[moved], moved + start, packed, None)
    names = [f"{name} of layer {idx}" for idx in range(shape.spec.num_layers) for name in ("q", "k", "v")]
    pairs = zip([*packed.found, packed_logits], [*own.found, logits], [*names, "logits"], strict=True)
    for ours, theirs, name in pairs:
        if (error := _relative_error(ours, theirs[moved])) > torch.finfo(shape.spec.dtype).eps ** 0.5:
            reason = (
                f"what it computes of a token depends on the token's place in the batch: the {name} of tokens "
                f"{where} differ by {error:.2g} of the largest when they are packed in another order"
            )
            raise UnsupportedModel(type(model).__name__, reason)


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The median, over tokens, of the largest difference in proportion to the largest number.

    A matrix product may round otherwise for other rows beside it, which can send a token to another expert; so
    one token decides nothing. What the order changes, it changes for more than half of them.
    """
    ours, theirs = (torch.nan_to_num(x.float()) for x in (ours, theirs))
    largest = theirs.abs().amax(1).clamp(min=1e-30)
    return float(((ours - theirs).abs().amax(1) / largest).median())


def _varied_ids(vocab_size: int, count: int, padding: int | None) -> torch.Tensor:
    """`count` token ids, int64, spread over the vocabulary; none is the padding, which some models skip."""
    ids = [(idx + 1) * vocab_size // (count + 1) for idx in range(count)]
    return torch.tensor([token - 1 if token == padding and token else token for token in ids])
