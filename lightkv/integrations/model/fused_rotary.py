"""A fused forward pass for attention modules that only project, normalise q and k, apply rotary positions and
attend.

It hands q and k to attention without their norms and positions, which the kernel that writes K/V applies on the
way. The cosines and sines are those that the model computes itself once a step, so every scaling, precision and
frequency by layer stays the model's own. `fuse` reads in the plan of a decoder layer (`plans/layer_plans.py`)
how its attention module computes, and compares that with the module's own forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightkv.attention import RotaryEmbedding
from lightkv.integrations.model.plans.layer_plans import LayerPlan, planned_layers
from lightkv.integrations.model.plans.own_pass import (
    Call,
    NoiseHandler,
    NotFusable,
    is_equal,
    noise_of_tokens,
    own_forward,
    recorded_calls,
    run_fused,
    run_own,
)
from lightkv.integrations.weights.weight import Weight
from lightkv.triton_kernels.norms import Norm
from lightkv.triton_kernels.write.inputs import HeadNorms
from lightkv.triton_kernels.write.write_kv import split_qkv

from .attention_call import ATTENTION, AttentionCall, AttentionHandler
from .context import given_cache
from .fused_norm import is_called_as_norm, norm_of
from .linears import forward_of, has_hooks, reset_forwards


@dataclass(frozen=True)
class AttentionLayout:
    """How an attention module makes q, k and v: by the plan of its layer, in the sizes that it has here.

    `norms`: what the plan's norms of heads compute, which is left to the kernel that writes K/V; None where
    their modules are called. `joined`: q, k and v as one product, in the place of three projections.
    """

    plan: LayerPlan
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    norms: HeadNorms | None = None
    joined: Weight | None = None

    def project(
        self, module: Any, x: Tensor, left: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns q, k and v of x `[1, T, C]`, each `[1, heads, T, dim]`, without positions, and without norms
        where these are `left` to the write; and the gate of the output, `[1, T, heads · v_dim]`, or None."""
        plan, dims, gate = self.plan, (self.head_dim, self.head_dim, self.v_dim), None
        if self.joined is not None:
            products = [self.joined.matmul(x)]
        else:
            products = [getattr(module, name)(x) for name in plan.qkv]
        if plan.is_gated:
            heads = torch.cat(products, -1).unflatten(-1, (-1, self.head_dim))
            q, k, v = heads.split((2 * self.num_heads, self.num_kv_heads, self.num_kv_heads), -2)
            gate, q = q[..., 1::2, :].flatten(2), q[..., ::2, :]
        elif len(products) == 3:
            q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(products, dims, strict=True))
        elif plan.is_by_head:
            qkv = products[0].unflatten(-1, (self.num_heads, sum(dims)))
            q, k, v = (qkv[..., end - dim : end] for dim, end in zip(dims, accumulate(dims), strict=True))
        else:
            q, k, v = split_qkv(products[0], self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim)
        # Each is [1, T, heads, dim] now.
        if left is None and (norms := plan.head_norms_of(module)):
            q, k = (self._normalise(norm, heads) for norm, heads in zip(norms, (q, k), strict=True))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate

    def _normalise(self, norm: Any, heads: Tensor) -> Tensor:
        """Returns heads `[1, T, heads, dim]` as the module `norm` normalises them."""
        if not self.plan.norms_over_all:
            return cast(Tensor, norm(heads))
        return cast(Tensor, norm(heads.flatten(2)).view(heads.shape))

    def attend(
        self, module: Any, x: Tensor, tables: tuple[Tensor, Tensor], handler: AttentionHandler
    ) -> Tensor:
        """Returns what `handler` computes as the attention of x `[1, T, C]`, `[1, T, heads · v_dim]`. It gets q
        and k without positions."""
        left = self._norms_to_leave(module)
        q, k, v, gate = self.project(module, x, left)
        call = AttentionCall(module, q, k, v, None, {}, self.rotary(tables, left))
        out = handler.attend(call).flatten(2)
        return out if gate is None else out * gate.sigmoid()

    def _norms_to_leave(self, module: Any) -> HeadNorms | None:
        """Returns the norms that are left to the write, with the weights that the modules have now; None where
        a module has got hooks or another forward pass, and so is called."""
        if self.norms is None:
            return None
        parts = self.plan.head_norms_of(module)
        if not all(map(is_called_as_norm, parts)):
            return None
        q, k = (
            norm if norm.weight is None else norm._replace(weight=part.weight.detach().view_as(norm.weight))
            for part, norm in zip(parts, self.norms[:2], strict=True)
        )
        return HeadNorms(q, k, self.norms.over_all)

    def rotary(self, tables: tuple[Tensor, Tensor], norms: HeadNorms | None) -> RotaryEmbedding:
        """Returns the rotary embedding of a model's cosines and sines, each `[1, T, 2n]`, or `[1, T, n]` if
        each angle stands there once."""
        if self.plan.angles == "once":
            cos, sin = (table[0].contiguous() for table in tables)  # some models transpose their angles
        elif self.plan.angles == "pairs":
            cos, sin = (table[0, :, ::2].contiguous() for table in tables)
        else:
            cos, sin = (table[0, :, : table.shape[-1] // 2] for table in tables)
        return RotaryEmbedding(cos, sin, self.plan.is_interleaved, norms)


def _fused_forward(module: Any, layout: AttentionLayout, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of `module`, fused if this is a call of `compute`; else the module's own."""
    tables: Any = kwargs.get("position_embeddings")
    handler: AttentionHandler | None = kwargs.get("lightkv")
    is_bound = module.config._attn_implementation == ATTENTION
    is_plain = tables is not None and given_cache(kwargs) is None
    if handler is None or not is_bound or not is_plain:
        return type(module).forward(module, *args, **kwargs)
    x = args[0] if args else kwargs["hidden_states"]
    return getattr(module, layout.plan.output)(layout.attend(module, x, tables, handler)), None


@torch.no_grad()
def fuse(model: PreTrainedModel) -> None:
    """Gives attention modules of a bound `model` the fused forward pass of their layer's plan, where theirs
    computes the same (`find_layout`).

    The model runs once, and each of these modules a few times more, on eight tokens. Modules with a forward
    pass other than their class's are left alone. Synchronises.
    """
    set_fused_forwards(model, {})
    plans = {
        attention: plan
        for layer, plan in planned_layers(cast(nn.Module, model)).items()
        if (attention := plan.mixer_of(layer)) is not None and "forward" not in vars(attention)
    }
    for module, call in recorded_calls(model, plans, NoiseHandler()).items() if plans else ():
        try:
            layout = find_layout(module, plans[module], call)
        except NotFusable:
            continue  # `fuse_layers` reports why
        cast(Any, module).forward = partial(_fused_forward, module, layout)


def find_layout(module: Any, plan: LayerPlan, call: Call) -> AttentionLayout:
    """Returns the layout of an attention module that computes what `plan` says, from runs of its own forward
    pass on noise in the place of the input of `call`.

    Under tables whose rotations are exact, the fused pass has to agree with it bit for bit, and under the
    model's own tables to the rounding of the dtype. Raises NotFusable otherwise.
    """
    tables: Any = call.kwargs.get("position_embeddings")
    if plan.angles is None or not _are_tables(tables, call.x) or given_cache(call.kwargs) is not None:
        raise NotFusable("it does not rotate by cosines and sines that its layer hands it")
    given = call.of(noise_of_tokens(tuple(call.x.shape), call.x))
    # These tables rotate every second token by a right angle, and the others not at all. The products are with
    # 1 and 0, so they are exact.
    token = torch.arange(call.x.shape[1], device=call.x.device)[:, None]
    cos = (token % 2 == 0).to(tables[0].dtype).expand(tables[0].shape)
    exact = given._replace(kwargs=given.kwargs | {"position_embeddings": (cos, 1 - cos)})
    own = partial(run_own, own_forward(module))
    expected, expected_exactly = _run(own, given), _run(own, exact)
    layout = AttentionLayout(
        plan, expected.q.shape[1], expected.k.shape[1], expected.q.shape[-1], expected.v.shape[-1]
    )
    if not _fit(tables, plan.angles, layout.head_dim, expected.k.dtype):
        raise NotFusable(f"its angles do not stand in its cosines and sines as its plan says ({plan.angles})")
    if not all(map(is_equal, _run(_fused(module, layout), exact), expected_exactly)):
        raise NotFusable("fused, its q, k, v or output are not the same")
    for one in (replace(layout, norms=_head_norms(module, layout)), layout):
        ours = _run(_fused(module, one), given)
        if _is_close(ours.q, expected.q) and _is_close(ours.k, expected.k):
            return one
    raise NotFusable("fused, its positions are not the same")


def layout_of(module: Any) -> AttentionLayout | None:
    """Returns the layout with which `module` has the fused forward pass; None if it has its own."""
    forward = forward_of(module, _fused_forward)
    return None if forward is None else cast(AttentionLayout, forward.args[1])


def use_joined(module: Any, joined: Weight) -> None:
    """Makes the fused forward pass of `module` compute q, k and v by `joined`."""
    layout = cast(AttentionLayout, layout_of(module))
    module.forward = partial(_fused_forward, module, replace(layout, joined=joined))


def fused_forwards(model: PreTrainedModel) -> dict[nn.Module, Callable[..., Any]]:
    """Returns the fused forward passes of the modules of `model`, for `set_fused_forwards`."""
    found = {module: forward_of(module, _fused_forward) for module in model.modules()}
    return {module: forward for module, forward in found.items() if forward is not None}


def set_fused_forwards(model: PreTrainedModel, forwards: dict[nn.Module, Callable[..., Any]]) -> None:
    """Gives modules the fused forward passes in `forwards`, and all other modules of `model` their own."""
    reset_forwards(cast(nn.Module, model), (_fused_forward,))
    for module, forward in forwards.items():
        module.forward = forward


def _fused(module: Any, layout: AttentionLayout) -> Callable[..., Any]:
    return partial(run_fused, partial(_fused_forward, module, layout))


class _Result(NamedTuple):
    """What a module called attention with, positions applied, and what the module returned."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor


def _run(forward: Callable[..., Any], given: Call) -> _Result:
    """Runs a module's `forward` on the arguments of a call, with noise as the output of attention. Raises
    NotFusable unless it attends once, and returns one tensor and None."""
    handler = NoiseHandler()
    output = forward(*given.args, **given.kwargs | {"lightkv": handler})
    if len(handler.calls) != 1:
        raise NotFusable(f"it attends {len(handler.calls)} times")
    if not isinstance(output, tuple) or len(output) != 2 or output[1] is not None:
        raise NotFusable("it does not return an output and None")
    (call,) = handler.calls
    return _Result(call.q, call.k, call.v, output[0])


def _head_norms(module: Any, layout: AttentionLayout) -> HeadNorms | None:
    """Returns the norms of q and k for the kernel that writes K/V; None where there are none, where it does not
    compute their kind, and where they have hooks."""
    plan, found = layout.plan, list[Norm]()
    num_heads_of = (layout.num_heads, layout.num_kv_heads)
    for part, num_heads in zip(plan.head_norms_of(module), num_heads_of, strict=False):
        norm = None if has_hooks(part) else norm_of(part)
        if norm is None or norm.bias is not None:
            return None
        weight = None if norm.weight is None else norm.weight.detach()
        if weight is not None and (plan.norms_over_all or weight.dim() == 2):
            weight = weight.view(num_heads, layout.head_dim)
        found.append(norm._replace(weight=weight))
    if not found:
        return None
    q, k = found
    return HeadNorms(q, k, plan.norms_over_all)


def _are_tables(tables: Any, x: Any) -> bool:
    """Returns whether x is `[1, T, C]`, and `tables` are cosines and sines `[1, T, n]`, with n even, for it."""
    if not isinstance(x, Tensor) or x.dim() != 3 or not isinstance(tables, tuple) or len(tables) != 2:
        return False
    shapes = {tuple(table.shape) if isinstance(table, Tensor) else () for table in tables}
    shape, *others = shapes
    return not others and len(shape) == 3 and shape[:2] == (1, x.shape[1]) and shape[2] % 2 == 0


def _fit(tables: tuple[Tensor, Tensor], angles: str, head_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether the angles of `tables` can stand where `angles` says, for heads of this size and type."""
    num_angles = tables[0].shape[-1] // (1 if angles == "once" else 2)
    if 2 * num_angles > head_dim or any(table.dtype not in (torch.float32, dtype) for table in tables):
        return False
    if angles == "once":
        return True
    return all(
        torch.equal(*((table[..., ::2], table[..., 1::2]) if angles == "pairs" else table.chunk(2, -1)))
        for table in tables
    )


def _is_close(ours: Tensor, own: Tensor) -> bool:
    """Compares up to the rounding of two products and their sum, each half an epsilon of the head's largest."""
    tolerance = 3 * torch.finfo(own.dtype).eps * own.abs().amax(-1, keepdim=True).float()
    return ours.shape == own.shape and bool(((ours.float() - own.float()).abs() <= tolerance).all())
