"""A forward pass of our own for attention modules that are projections, rotary positions and attention, no
more: it hands q and k on without their positions, which are applied in the pass that writes K/V.

Knows the names that transformers gives to projections and norms, and no model: a module runs so only where
`fuse` found that to be the same, and otherwise as transformers wrote it. The cosines and sines are those that
the model computes once a step for itself, with whatever scaling, precision and frequencies by layer it has.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from transformers import PreTrainedModel

from lightkv.attention import RotaryEmbedding
from lightkv.triton_kernels.write_kv import split_qkv

from .context import context_length

if TYPE_CHECKING:
    from .hf_model import Receiver

# A forward pass over tokens at these positions (int64 `[T]`), whose attention the receiver takes.
Run = Callable[[torch.Tensor, "Receiver"], None]

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_ONE_AFTER_THE_OTHER = "qkv_proj"  # all heads of q, then of k, then of v
_HEAD_BY_HEAD = "query_key_value"  # q, k and v of the first head, then of the second
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_OUTPUTS = ("o_proj", "dense", "out_proj")
_LOUD = 64.0  # times a usual input: what a module that clips would clip
_CONTEXT = 2048  # for a model that names none


@dataclass(frozen=True)
class AttentionLayout:
    """What a module computes beside its attention."""

    implementation: str  # of attention, under which this holds
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    projection: str | None  # the module of a joint projection; None: three of them
    norms: tuple[str, str] | None  # of each head of q and k
    output: str
    interleaved: bool = False  # pairs, as RotaryEmbedding has it
    repeated_angles: bool = False  # the model's tables have each angle twice in a row; else in two halves

    def project(self, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of x `[1, T, C]`: q, k and v, `[1, heads, T, dim]`, without positions."""
        dims = self.head_dim, self.head_dim, self.v_dim
        if self.projection is None:
            parts = module.q_proj(x), module.k_proj(x), module.v_proj(x)
            q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
        elif self.projection == _ONE_AFTER_THE_OTHER:
            qkv = getattr(module, self.projection)(x)
            q, k, v = split_qkv(qkv, self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim)
        else:
            qkv = getattr(module, self.projection)(x).unflatten(-1, (self.num_heads, sum(dims)))
            q, k, v = (qkv[..., end - dim : end] for dim, end in zip(dims, accumulate(dims), strict=True))
        # [1, T, heads, dim]
        if self.norms is not None:
            q, k = (getattr(module, name)(part) for name, part in zip(self.norms, (q, k), strict=True))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def rotary(self, tables: tuple[torch.Tensor, torch.Tensor]) -> RotaryEmbedding:
        """Of a model's cosines and sines `[1, T, 2n]`."""
        if self.repeated_angles:
            cos, sin = (table[0, :, ::2].contiguous() for table in tables)
        else:
            cos, sin = (table[0, :, : table.shape[-1] // 2] for table in tables)
        return RotaryEmbedding(cos, sin, self.interleaved)


class TurningReceiver(Protocol):
    """A receiver of attention calls that takes q and k without their positions, too."""

    def turn_and_attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryEmbedding | None,
    ) -> torch.Tensor:
        """q `[1, heads, T, k_dim]`, turned in place by `rotary`; k likewise, v `[1, heads, T, v_dim]`. Returns
        `[1, T, heads, v_dim]`."""


def _forward(module: Any, form: AttentionLayout, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of `module`; its own, unless this is a call of `compute` with a TurningReceiver."""
    tables: Any = kwargs.get("position_embeddings")
    receiver: Any = kwargs.get("lightkv")
    is_bound = module.config._attn_implementation == form.implementation
    is_plain = tables is not None and kwargs.get("past_key_values") is None
    if not is_bound or not is_plain or not hasattr(receiver, "turn_and_attend"):
        return type(module).forward(module, *args, **kwargs)
    x = args[0] if args else kwargs["hidden_states"]
    q, k, v = form.project(module, x)
    out = receiver.turn_and_attend(module, q, k, v, form.rotary(tables))
    return getattr(module, form.output)(out.reshape(*x.shape[:-1], -1)), None


def fused_layers(model: PreTrainedModel) -> list[int]:
    """The layers of a bound `model` whose positions are applied in the pass that writes K/V, ascending."""
    return sorted(cast(int, module.layer_idx) for module in model.modules() if _is_fused(module))


def fuse(model: PreTrainedModel, implementation: str, run: Run) -> None:
    """Give the attention modules of `model` the forward pass of this file where theirs is found to be the same.

    Every candidate is compared with its own forward pass, on random inputs of two magnitudes at positions up to
    the last of the context: bit for bit with tables by which a turn is exact, to the rounding of its type with
    the model's. `implementation`: of attention, which `run` is called with. Synchronises.
    """
    set_fused_forwards(model, {})
    watches = {module: _Watch(module, implementation) for module in model.modules() if _is_candidate(module)}
    if not watches:
        return
    context = context_length(model.config.get_text_config()) or _CONTEXT
    # Eight, for every input and every table of `_find` at a low position and at a high one.
    places = (0, 1, 2, 3, context // 3, context // 2, context - 2, context - 1)
    positions = [max(0, min(place, context - 1)) for place in places]
    try:
        for module, watch in watches.items():
            module.forward = watch
        with torch.no_grad():
            run(torch.tensor(positions, device=model.device), _Answers())
    finally:
        for module in watches:
            del module.forward
    for module, watch in watches.items():
        if watch.form is not None:
            module.forward = partial(_forward, module, watch.form)


def fused_forwards(model: PreTrainedModel) -> dict[torch.nn.Module, Callable[..., Any]]:
    """The forward passes that `fuse` has given to modules of `model`, for `set_fused_forwards`."""
    return {module: module.forward for module in model.modules() if _is_fused(module)}


def set_fused_forwards(model: PreTrainedModel, forwards: dict[torch.nn.Module, Callable[..., Any]]) -> None:
    """Give them to these modules; all others have their own again."""
    for module in model.modules():
        if _is_fused(module):
            del module.forward
    for module, forward in forwards.items():
        module.forward = forward


def _is_fused(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _is_candidate(module: Any) -> bool:
    """Has it what `AttentionLayout` knows, and no forward pass that somebody else put there?"""
    projections = (_SEPARATE, (_ONE_AFTER_THE_OTHER,), (_HEAD_BY_HEAD,))
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "config")
        and "forward" not in vars(module)
        and any(_has(module, *names) for names in projections)
        and any(_has(module, name) for name in _OUTPUTS)
    )


def _has(module: torch.nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names)


class _Call(NamedTuple):
    """What a module's attention was called with, positions applied, and what the module returned."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor


class _Answers:
    """Takes attention calls, and answers with noise, the same for the same shapes."""

    def __init__(self) -> None:
        self._calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        return self.turn_and_attend(module, q, k, v, None)

    def turn_and_attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryEmbedding | None,
    ) -> torch.Tensor:
        if rotary is not None:
            for x in (q, k):
                rotary.rotate(x[0].transpose(0, 1))
        self._calls.append((q, k, v))
        return _noise((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), q)

    def call(self, output: Any) -> _Call:
        """The only one, of a module that returned `output`. Raises ValueError if it returned more."""
        (call,) = self._calls
        attended, weights = output
        if weights is not None:
            raise ValueError("it returns more than what it attended to")
        return _Call(*call, attended)


def _noise(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


class _Watch:
    """In the place of a module's forward pass while the model runs once: computes its own, and compares."""

    def __init__(self, module: Any, implementation: str) -> None:
        self.form: AttentionLayout | None = None
        self._module = module
        self._implementation = implementation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = type(self._module).forward(self._module, *args, **kwargs)
        try:
            self.form = self._find(args, kwargs)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            self.form = None  # it is called, or calls, in a way that `_forward` does not
        return output

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionLayout | None:
        """The form that computes the same for each of the inputs; None if none does."""
        tables = kwargs["position_embeddings"]
        x = args[0] if args else kwargs["hidden_states"]
        if not _are_tables(tables, x) or kwargs.get("past_key_values") is not None:
            return None
        token = torch.arange(x.shape[1], device=x.device)[:, None]  # [T, 1]
        x = _noise(tuple(x.shape), x) * torch.where(token // 2 % 2 == 1, _LOUD, 1.0).to(x.dtype)
        if args:
            args = (x, *args[1:])
        else:
            kwargs = kwargs | {"hidden_states": x}
        # Some tokens stay as they are, the others turn by a right angle: products with 1 and 0, and so exact.
        stays = (token % 2 == 0).to(tables[0].dtype).expand(tables[0].shape)
        expected = self._own(args, kwargs)
        expected_exactly = self._own(args, kwargs | {"position_embeddings": (stays, 1 - stays)})
        if any(table.dtype not in (torch.float32, expected.k.dtype) for table in tables):
            return None
        plain = self._plain_form(expected)
        for interleaved, twice in product((False, True), (False, True)):
            if not all(_repeats(table, twice) for table in tables):
                continue
            form = replace(plain, interleaved=interleaved, repeated_angles=twice)
            ours = self._ours(form, args, kwargs | {"position_embeddings": (stays, 1 - stays)})
            if all(map(_is_equal, ours, expected_exactly)):
                ours = self._ours(form, args, kwargs)
                if _is_close(ours.q, expected.q) and _is_close(ours.k, expected.k):
                    return form
        return None

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        answers = _Answers()
        output = type(self._module).forward(self._module, *args, **kwargs | {"lightkv": answers})
        return answers.call(output)

    def _ours(self, form: AttentionLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        answers = _Answers()
        return answers.call(_forward(self._module, form, *args, **kwargs | {"lightkv": answers}))

    def _plain_form(self, call: _Call) -> AttentionLayout:
        """What the module's names and a call of it say, the tables aside."""
        module = self._module
        q, k, v, _ = call
        projection = None
        if not _has(module, *_SEPARATE):
            projection = _ONE_AFTER_THE_OTHER if _has(module, _ONE_AFTER_THE_OTHER) else _HEAD_BY_HEAD
        return AttentionLayout(
            implementation=self._implementation,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[-1],
            v_dim=v.shape[-1],
            projection=projection,
            norms=next((names for names in _NORMS if _has(module, *names)), None),
            output=next(name for name in _OUTPUTS if _has(module, name)),
        )


def _are_tables(tables: Any, x: torch.Tensor) -> bool:
    """Cosines and sines `[1, T, 2n]` for x `[1, T, C]`?"""
    return (
        isinstance(tables, tuple)
        and len(tables) == 2
        and all(isinstance(table, torch.Tensor) for table in tables)
        and tables[0].shape == tables[1].shape == (1, x.shape[1], tables[0].shape[-1])
        and tables[0].shape[-1] % 2 == 0
    )


def _repeats(table: torch.Tensor, twice: bool) -> bool:
    first, second = (table[..., ::2], table[..., 1::2]) if twice else table.chunk(2, -1)
    return torch.equal(first, second)


def _is_equal(ours: torch.Tensor, own: torch.Tensor) -> bool:
    return ours.dtype == own.dtype and torch.equal(ours, own)


def _is_close(ours: torch.Tensor, own: torch.Tensor) -> bool:
    """To the rounding of two products and their sum, each by half an epsilon of the largest of its head."""
    tolerance = 3 * torch.finfo(own.dtype).eps * own.abs().amax(-1, keepdim=True).float()
    return ours.shape == own.shape and bool(((ours.float() - own.float()).abs() <= tolerance).all())
