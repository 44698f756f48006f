"""The attention of model families that compute their scores themselves, one function for each.

Each function projects q, k and v with the module's own projections, attends by `ModuleCall.attend`, and applies
the module's own output projection. `adapt.py` puts them into models, and `proof.py` compares them with the
modules' own forward passes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightkv.attention import RotaryEmbedding
from lightkv.integrations.model.attention_call import AttentionCall, AttentionHandler


class ModuleCall(NamedTuple):
    """One call of an attention module by its layer, over `T` packed tokens."""

    module: Any
    handler: AttentionHandler
    slopes: Tensor | None  # of ALiBi, float32 [heads]; None for a model without it
    args: tuple[Any, ...]  # what the layer passes by place
    arguments: Mapping[str, Any]  # what the layer passes by name

    @property
    def x(self) -> Tensor:
        """The input of the module, `[1, T, C]`."""
        return cast(Tensor, self.args[0] if self.args else self.arguments["hidden_states"])

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int = 0,
        rotary: RotaryEmbedding | None = None,
    ) -> Tensor:
        """Returns the attention output of all heads, `[1, T, heads * v_dim]`.

        q, k and v are `[1, T, heads, dim]`. `scale`, `window`: as in AttentionOptions. `rotary` is applied to q
        and k where it is not None, and may change them in place.
        """
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        options = {"scaling": scale, "sliding_window": window, "alibi_slopes": self.slopes}
        return self.handler.attend(AttentionCall(self.module, q, k, v, None, options, rotary)).flatten(2)


def _heads(
    module: Any, x: Tensor, head_dim: int, names: Iterable[str] = ("q_proj", "k_proj", "v_proj")
) -> list[Tensor]:
    """Returns the heads, each `[1, T, heads, head_dim]`, that the projections `names` of a module make of x."""
    return [getattr(module, name)(x).unflatten(-1, (-1, head_dim)) for name in names]


def bloom(call: ModuleCall) -> Tensor:
    """Computes Bloom's attention, and adds the residual, which the module does there."""
    module, residual = call.module, call.args[1]
    qkv = module.query_key_value(call.x).unflatten(-1, (module.num_heads, 3, module.head_dim))
    q, k, v = qkv.unbind(-2)
    return cast(Tensor, module.dense(call.attend(q, k, v, module.inv_norm_factor)) + residual)


def mpt(call: ModuleCall) -> Tensor:
    """Computes MPT's attention, whose q, k and v may be clipped."""
    module = call.module
    qkv = module.Wqkv(call.x)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = qkv.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(-3)
    return cast(Tensor, module.out_proj(call.attend(q, k, v, module.softmax_scale)))


def falcon(call: ModuleCall) -> Tensor:
    """Computes Falcon's attention of all three kinds: with one K/V head for all query heads, for each group of
    them, or for each of them; with rotary positions or ALiBi.

    The product holds the query heads of a group, then its K and its V head, and then the next group's.
    """
    module = call.module
    num_groups = module.num_kv_heads
    qkv = module.query_key_value(call.x).unflatten(-1, (num_groups, -1, module.head_dim))
    q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
    rotary = _rotary_of_halves(call.arguments["position_embeddings"]) if call.slopes is None else None
    return cast(Tensor, module.dense(call.attend(q, k, v, module.inv_norm_factor, rotary=rotary)))


def gpt_j(call: ModuleCall) -> Tensor:
    """Computes GPT-J's attention."""
    module = call.module
    q, k, v = _heads(module, call.x, module.head_dim)
    return _attend_by_table(call, q, k, v)


def codegen(call: ModuleCall) -> Tensor:
    """Computes CodeGen's attention, whose product holds q, v and k of each quarter of the heads."""
    module = call.module
    qkv = module.qkv_proj(call.x).unflatten(-1, (4, 3, -1, module.head_dim))
    q, v, k = (part.flatten(2, 3) for part in qkv.unbind(-3))
    return _attend_by_table(call, q, k, v)


def _attend_by_table(call: ModuleCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends by a module with a table that holds the sines and then the cosines of every position."""
    module = call.module
    (positions,) = call.arguments["position_ids"]
    sin, cos = module.embed_positions.index_select(0, positions).to(k.dtype).chunk(2, -1)
    out = call.attend(q, k, v, 1.0 / module.scale_attn, rotary=RotaryEmbedding(cos, sin, interleaved=True))
    return cast(Tensor, module.out_proj(out))


def gpt_neox_japanese(call: ModuleCall) -> Tensor:
    """Computes the attention of GPT-NeoX-Japanese, whose product holds q, k and v of each head. The last layer
    adds its bias afterwards."""
    module = call.module
    qkv = module.query_key_value(call.x).unflatten(-1, (module.num_attention_heads, 3, module.head_size))
    q, k, v = qkv.unbind(-2)
    rotary = _rotary_of_halves(call.arguments["position_embeddings"])
    return cast(Tensor, module.dense(call.attend(q, k, v, 1.0 / module.norm_factor, rotary=rotary)))


def _rotary_of_halves(tables: tuple[Tensor, Tensor]) -> RotaryEmbedding:
    """Returns the rotary embedding of cosines and sines `[1, T, 2n]`; every angle stands in both halves."""
    cos, sin = (table[0, :, : table.shape[-1] // 2] for table in tables)
    return RotaryEmbedding(cos, sin)


def openai_gpt(call: ModuleCall) -> Tensor:
    """Computes the attention of the first GPT, whose product holds q, k and v of all heads."""
    module = call.module
    q, k, v = module.c_attn(call.x).unflatten(-1, (3, module.n_head, -1)).unbind(-3)
    scale = q.shape[-1] ** -0.5 if module.scale else 1.0
    return cast(Tensor, module.c_proj(call.attend(q, k, v, scale)))


def bart(call: ModuleCall) -> Tensor:
    """Computes the attention of decoders that have BART's modules."""
    module = call.module
    q, k, v = _heads(module, call.x, module.head_dim)
    return cast(Tensor, module.out_proj(call.attend(q, k, v, module.scaling)))


def bert(call: ModuleCall) -> Tensor:
    """Computes the attention of models that have BERT's modules, without the output projection, which is a
    module of its own. RoFormer hands it the sines and then the cosines of the positions, for V, too, if
    `rotary_value` says so."""
    module = call.module
    dim = module.attention_head_size
    q, k, v = _heads(module, call.x, dim, ("query", "key", "value"))
    rotary = None
    if hasattr(module, "rotary_value"):
        table = call.arguments["sinusoidal_pos"]  # [1, 1, T, dim]
        sin, cos = table[0, 0].to(k.dtype).chunk(2, -1)
        rotary = RotaryEmbedding(cos, sin, interleaved=True)
        if module.rotary_value:
            v = module.apply_rotary_position_embeddings(table, *[v.transpose(1, 2)] * 2)[0].transpose(1, 2)
    return call.attend(q, k, v, dim**-0.5, rotary=rotary)


def diff_llama(call: ModuleCall) -> Tensor:
    """Computes DiffLlama's attention, the difference of two in each pair of heads.

    Each K/V head is given the V of two: every head attends to the first half of the V heads and to the second.
    """
    module = call.module
    dim = module.head_dim
    q, k, v = _heads(module, call.x, dim)
    both = torch.cat(v.chunk(2, -2), -1)  # [1, T, kv_heads / 2, 2 * dim]
    rotary = _rotary_of_halves(call.arguments["position_embeddings"])
    out = call.attend(q, k, both.repeat(1, 1, 2, 1), module.scaling, rotary=rotary)
    first, second = out.unflatten(-1, (-1, 2 * dim)).chunk(2, -2)
    products = (
        torch.exp((a * b).sum(-1, dtype=torch.float32)).to(q.dtype)
        for a, b in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    )
    factor = next(products) - next(products) + module.lambda_init
    difference = (1 - module.lambda_init) * module.groupnorm(first - factor * second)
    return cast(Tensor, module.o_proj(difference.flatten(2)))


def gpt_neo(call: ModuleCall) -> Tensor:
    """Computes GPT-Neo's attention, whose scores are not scaled, and whose local layers have windows."""
    module = call.module.attention
    q, k, v = _heads(module, call.x, module.head_dim)
    window = module.config.window_size if module.attention_type == "local" else 0
    return cast(Tensor, module.out_proj(call.attend(q, k, v, 1.0, window)))


# --------------------------------------------------------------------------------
# The slopes of ALiBi, from the bias that the model itself makes for two positions


def bloom_slopes(model: Any) -> Tensor:
    """Returns the slopes of a Bloom model, float32 `[heads]`."""
    bloom_model, mask = model.transformer, torch.ones(1, 2, dtype=torch.int64, device=model.device)
    bias = bloom_model.build_alibi_tensor(mask, bloom_model.num_heads, torch.float32)
    return cast(Tensor, bias[:, 0, 1].contiguous())


def mpt_slopes(model: Any) -> Tensor:
    """Returns the slopes of an MPT model, float32 `[heads]`.

    As in transformers' forward pass, `alibi` and `alibi_bias_max` of the configuration change nothing.
    """
    mpt_model = model.transformer
    bias = mpt_model.build_mpt_alibi_tensor(mpt_model.num_heads, 2, device=model.device)
    return cast(Tensor, -bias[:, 0, 0].contiguous())


def falcon_slopes(model: Any) -> Tensor | None:
    """Returns the slopes of a Falcon model, float32 `[heads]`; None if it has rotary positions.

    transformers rounds them to bfloat16 and scales the bias as it scales the scores. It also rounds the bias,
    slope times position, to bfloat16, which lightkv does not.
    """
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    if not model.config.alibi:
        return None
    num_heads = model.config.num_attention_heads
    mask = torch.ones(1, 2, dtype=torch.int64, device=model.device)
    bias = build_alibi_tensor(mask, num_heads, torch.float32)
    return cast(Tensor, bias[:, 0, 1].contiguous() / (model.config.hidden_size // num_heads) ** 0.5)
