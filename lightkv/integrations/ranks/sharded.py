"""Loads a rank's part of a model, and gives the parts the forward passes with which the ranks compute together.

transformers says in a plan how each module of a model is divided (`tp_plan`), and its loader reads a rank's
part of each tensor only. Its own forward passes for divided modules do work on the host at every call; here
every module keeps the one of its class, with at most one exchange around it:

    colwise            a rank has some outputs                       no exchange
    colwise, gathered  likewise, but all outputs are needed          the outputs side by side
    rowwise            a rank has some inputs, and returns a term    the sum of the terms
    embedding          a rank has some tokens of the vocabulary      the sum, of which one term is not 0
    experts            a rank has a part of each expert, or some     the sum of the terms
                       experts as a whole

A decoder layer so has two sums: behind the attention's output projection, and behind the MLP's.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedConfig, PreTrainedModel

from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.mixers.heads import Heads
from lightkv.integrations.model.mixers.mixer import Mixer, mixers_of
from lightkv.integrations.weights.experts import DivisibleExperts
from lightkv.integrations.weights.plain import PlainWeight
from lightkv.integrations.weights.weight import Weight
from lightkv.integrations.weights.weight_part import WeightPart, weight_of

from .group import RankGroup
from .term_room import TermPlace


def _halves(block: str, colwise: tuple[str, ...], rowwise: str) -> dict[str, str]:
    """Returns the plan of a block of a layer: linear layers of which a rank has some outputs, and one behind
    them of which it has some inputs."""
    plan = {f"layers.*.{block}.{name}": "colwise" for name in colwise}
    return plan | {f"layers.*.{block}.{rowwise}": "rowwise"}


# What has to follow the forward pass of a module's class, by the style of its plan.
_NOTHING = {"colwise", "packed_colwise", "packed_rowwise", "replicate", "local_params"}
_NOTHING |= {"replicated_with_grad_allreduce", "grouped_gemm"}
_SUM = {"rowwise", "rowwise_split_input", "rowwise_rep", "moe_tp_experts", "all_reduce"}
_GATHER = {"colwise_gather_output", "colwise_rep"}
_EMBEDDING = {"embedding_rowwise"}
_SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION = _halves("self_attn", _QKV, "o_proj")
_GATED = _halves("feed_forward", ("gate_proj", "up_proj"), "down_proj")
_LFM = _halves("feed_forward", ("w1", "w3"), "w2")
# What is added to transformers' plans, by the type of the (text) model and names in its decoder. For gpt-oss it
# has one of whole experts alone, which is how weights in MXFP4 can be divided.
_MORE = {
    "bamba": _ATTENTION | _GATED,
    "falcon_h1": _ATTENTION | _GATED,
    "gpt_oss": {
        **_ATTENTION,
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.gate_up_proj_bias": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj_bias": "grouped_gemm",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "granitemoehybrid": {
        **_ATTENTION,
        "layers.*.shared_mlp.input_linear": "packed_colwise",
        "layers.*.shared_mlp.output_linear": "rowwise",
    },
    "lfm2": _halves("self_attn", _QKV, "out_proj") | _LFM,
    "lfm2_moe": _halves("self_attn", _QKV, "out_proj") | _LFM,
    "lfm3": _halves("self_attn", (*_QKV, "g_proj"), "o_proj") | _LFM,
    "nemotron_h": {
        **_halves("mixer", _QKV, "o_proj"),
        **_halves("mixer", ("up_proj",), "down_proj"),
        **_halves("mixer.shared_experts", ("up_proj",), "down_proj"),
    },
    "zamba2": {  # its adapters, and so what they are added to, are whole
        "layers.*.shared_transformer.self_attn.o_proj": "rowwise_split_input",
        "layers.*.shared_transformer.feed_forward.down_proj": "rowwise_split_input",
    },
}


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some of the inputs: maps a rank's `[..., in_features]` to the whole
    `[..., out_features]`. `begin`: the ranks are given the inputs of all, and this one's begin there."""

    def __init__(self, linear: nn.Linear | WeightPart, ranks: RankGroup, begin: int | None = None) -> None:
        super().__init__()
        self.linear = linear
        if isinstance(linear, WeightPart):
            self.bias = None  # rank 0 alone keeps it, and adds it to its term
        else:
            self.bias = linear.bias  # added once, to the sum
            linear.register_parameter("bias", None)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._ranks = ranks
        self._begin = begin
        self._weight: Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._begin is not None:
            x = x.narrow(-1, self._begin, self.in_features)
        y = self._ranks.sum(self.linear(x))
        return y if self.bias is None else y + self.bias

    def place(self, turn: int, x: Tensor) -> TermPlace | None:
        """Returns the place for this rank's term of x, where it is added up with a layer's residual and norm:
        `turn` 0 behind attention, 1 behind the MLP. None where the forward pass is called instead."""
        room = self._ranks.room
        if room is None or self.bias is not None or self._begin is not None:
            return None
        return room.place(turn, x, self.out_features)

    def term(self, x: Tensor, place: TermPlace) -> Tensor:
        """Returns this rank's term of x, `[T, out_features]` in its place."""
        if self._weight is None:
            self._weight = weight_of(self.linear)
        rows = x.reshape(-1, x.shape[-1])
        return self._weight.matmul(rows, place.rows(len(rows), self.out_features, x.dtype))


class GatheredLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs, and returns all of them."""

    def __init__(self, linear: nn.Linear | WeightPart, ranks: RankGroup, out_features: int) -> None:
        super().__init__()
        self.linear = linear
        self.in_features = linear.in_features
        self.out_features = out_features
        self._missing = rank_part_size(out_features, ranks) - linear.out_features  # in the last parts
        self._ranks = ranks

    @property
    def weight(self) -> Tensor:
        """The weight of this rank's outputs."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.pad(self.linear(x), (0, self._missing)) if self._missing else self.linear(x)
        return self._ranks.gather(y).narrow(-1, 0, self.out_features)


def rank_part_size(size: int, ranks: RankGroup) -> int:
    """Returns the size of each rank's part of a dimension; the last parts may be smaller, or empty."""
    return -(-size // ranks.size)


def part_of_heads(values: Tensor, num_own: int, ranks: RankGroup) -> Tensor:
    """Returns those of `values`, one for each K/V head of the model, that are for this rank's `num_own`."""
    begin = ranks.rank * len(values) // ranks.size if num_own < len(values) else 0
    return values[begin : begin + num_own]


def load_rank_part(
    directory: Any, ranks: RankGroup, config: PreTrainedConfig, model_class: Any, **arguments: Any
) -> Any:
    """Returns what `from_pretrained` of `model_class` returns, with this rank's part of the weights.

    `model_class`: AutoModelForCausalLM, or a class that makes models of `config` as that does. Raises
    UnsupportedModel where the model cannot be divided among so many ranks.
    """
    # Imported here, since a model on one rank needs neither them nor the half second that they take.
    from transformers.distributed import DistributedConfig

    with torch.device("meta"):
        empty = model_class.from_config(config)
    plan = _plan(empty, ranks)
    os.environ["LOCAL_RANK"] = str(ranks.device.index or 0)  # by which transformers chooses the device
    divided = DistributedConfig(tp_size=ranks.size, tp_plan=_for_loader(plan, empty))
    loaded = model_class.from_pretrained(directory, config=config, distributed_config=divided, **arguments)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    _divide(model, ranks, plan)
    return loaded


def divide_shapes(model: PreTrainedModel, ranks: RankGroup) -> None:
    """Makes a model on the meta device what `load_rank_part` returns for it on rank 0, but for the numbers.

    `ranks`: `RankGroup.of_shapes`. Raises UnsupportedModel as `load_rank_part` does.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    plan = _plan(model, ranks)
    root, seen = cast(nn.Module, model), set[nn.Parameter]()
    for name, parameter in list(root.named_parameters(remove_duplicate=False)):
        if parameter in seen:  # tied weights are divided one by one, as before they are loaded
            owner, _, own = name.rpartition(".")
            setattr(root.get_submodule(owner), own, nn.Parameter(parameter.detach(), requires_grad=False))
        seen.add(parameter)
    dense = init_device_mesh(
        "meta", (1, 1, 1, ranks.size), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
    )
    divided = DistributedConfig(tp_size=ranks.size, tp_plan=_for_loader(plan, model))
    model.maybe_distribute_model(model, divided, TransformersDeviceMesh(dense, dense))
    model.tie_weights()
    _divide(model, ranks, plan)


def _plan(model: Any, ranks: RankGroup) -> dict[str, str]:
    """Returns the model's plan, by names with * for numbers, with what this many ranks change of it."""
    config = model.config
    name, text = type(model).__name__, config.get_text_config()
    plan, more = dict(model.tp_plan or {}), _MORE.get(text.model_type, {})
    if more:
        decoder = next(key for key, module in model.named_modules() if module is model.get_decoder())
        plan |= {f"{decoder}.{key}": style for key, style in more.items()}
        if "lm_head" in plan:  # to which the embedding may be tied
            plan[f"{decoder}.embed_tokens"] = "embedding_rowwise"
    names = {module: key for key, module in model.named_modules()}
    mixers = {names[mixer.module] for mixer in mixers_of(model)}
    for mixer, heads in _divisible_mixers(model, ranks):
        for part in (*heads.sections, heads.output):
            if (key := _generic(f"{names[mixer.module]}.{part}")) in plan:
                plan[key] = "replicate"  # `_divide_mixers` divides it
    if not any("layers" in key for key in plan):
        raise UnsupportedModel(
            name, "transformers has no plan of how to divide its layers among ranks (tp_plan)"
        )
    known = _NOTHING | _SUM | _GATHER | _EMBEDDING
    if strange := sorted(set(plan.values()) - known):
        raise UnsupportedModel(name, f"its plan divides modules in ways not known here: {', '.join(strange)}")
    keys = {
        module.out_features
        for key, module in model.named_modules()
        if _last(key) == "k_proj" and key.rpartition(".")[0] not in mixers and isinstance(module, nn.Linear)
    }
    if len(keys) > 1:
        raise UnsupportedModel(name, "its layers' K/V heads differ, which are not divided among ranks")
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    splits_heads = any(_last(key) == "q_proj" and style == "colwise" for key, style in plan.items())
    if splits_heads and (num_heads % ranks.size or (num_kv_heads % ranks.size and ranks.size % num_kv_heads)):
        allowed = [size for size in range(2, num_heads + 1) if _fits(num_heads, num_kv_heads, size)]
        raise UnsupportedModel(
            name,
            f"{num_heads} heads and {num_kv_heads} K/V heads cannot be divided among {ranks.size} ranks, "
            f"but among {', '.join(map(str, allowed)) or 1}",
        )
    if splits_heads and num_kv_heads < ranks.size:
        # Several ranks need the same head. Each reads all of them, and keeps one.
        plan |= {key: "replicate" for key in plan if _last(key) in _KEYS_AND_VALUES}
    for key in [key for key, style in plan.items() if _last(key) == "gate_up_proj" and style in _GATHER]:
        # Gate and up as one weight: each rank takes its part of both, where transformers gathers and splits.
        down = f"{key.rpartition('.')[0]}.down_proj"
        if plan.get(down) in _SPLIT_INPUT:
            plan |= {key: "packed_colwise", down: "rowwise"}
    return plan


def _for_loader(plan: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Returns what transformers' loader divides by the plan: quantised experts are no parameters."""
    names = {_generic(name) for named in (model.named_modules, model.named_parameters) for name, _ in named()}
    return {key: style for key, style in plan.items() if key in names}


def _fits(num_heads: int, num_kv_heads: int, size: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _divide(model: PreTrainedModel, ranks: RankGroup, plan: Mapping[str, str]) -> None:
    """Makes the parts that were loaded plain parameters, and gives the modules the exchanges of their
    styles."""
    from torch.distributed.tensor import DTensor

    root = cast(nn.Module, model)
    if not any(isinstance(parameter, DTensor) for parameter in root.parameters()):
        raise UnsupportedModel(type(model).__name__, "transformers' loader divided none of its weights")
    local: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if parameter not in local:
                    local[parameter] = nn.Parameter(parameter.to_local(), requires_grad=False)
                module._parameters[name] = local[parameter]
        vars(module).pop("forward", None)
    for name, module in root.named_modules():
        for own, experts in list(vars(module).items()):
            if isinstance(experts, DivisibleExperts):
                style = plan.get(_generic(f"{name}.{own}"), "replicate")
                setattr(module, own, _own_experts(experts, style, ranks))
    styled = [(name, one, plan[key]) for name, one in root.named_modules() if (key := _generic(name)) in plan]
    for name, module, style in styled:
        if isinstance(module, nn.Linear | WeightPart):
            whole_in, whole_out = module.in_features, module.out_features
            if isinstance(module, WeightPart):
                _keep_quantised(module, style, ranks)
            else:
                module.out_features, module.in_features = module.weight.shape
            if style == "replicate" and _last(name) in _KEYS_AND_VALUES:
                _keep_head(module, model.config.get_text_config(), ranks)
            if style in _SUM:
                begin = ranks.rank * rank_part_size(whole_in, ranks) if style in _SPLIT_INPUT else None
                root.set_submodule(name, SummedLinear(module, ranks, begin))
            elif style in _GATHER:
                root.set_submodule(name, GatheredLinear(module, ranks, whole_out))
        elif style in _EMBEDDING:
            cast(Any, module).padding_idx = None  # it may be in another part; only gradients depend on it
            module.forward = partial(_embed, module, ranks)
        elif style in _SUM:
            has_some = getattr(module, "_is_expert_parallel", False)
            module.forward = partial(_of_own_experts if has_some else _summed, module, ranks)
    _divide_mixers(model, ranks)


def _divisible_mixers(model: PreTrainedModel, ranks: RankGroup) -> list[tuple[Mixer, Heads]]:
    """Returns the mixers of which each rank computes some heads. Every rank computes the others as a whole."""
    mixers = [(mixer, mixer.heads) for mixer in mixers_of(model)]
    return [(mixer, heads) for mixer, heads in mixers if heads is not None and heads.num % ranks.size == 0]


def _divide_mixers(model: PreTrainedModel, ranks: RankGroup) -> None:
    """Keeps this rank's heads of mixers that were loaded whole: a plan cannot name the sections of a weight."""
    for mixer, heads in _divisible_mixers(model, ranks):
        module = mixer.module
        for name, sections in heads.sections.items():
            part = getattr(module, name)
            if isinstance(part, Tensor):
                _keep_part(module, name, sections, -1, ranks)
                continue
            if isinstance(part, WeightPart):
                ends = accumulate(sections, initial=0)
                part.keep(0, [_span(begin, size, ranks) for begin, size in zip(ends, sections, strict=False)])
                continue
            for own, _ in list(part.named_parameters(recurse=False)):
                _keep_part(part, own, sections, 0, ranks)
            _divide_sizes(part, ("out_features", "in_channels", "out_channels", "groups", "n_groups"), ranks)
        _divide_sizes(module, heads.sizes, ranks)
        output = getattr(module, heads.output)
        if isinstance(output, WeightPart):
            _keep_quantised(output, "rowwise", ranks)
        else:
            _keep_part(output, "weight", (output.in_features,), 1, ranks)
            _divide_sizes(output, ("in_features",), ranks)
        setattr(module, heads.output, SummedLinear(output, ranks))


def _keep_part(owner: Any, name: str, sections: Sequence[int], dim: int, ranks: RankGroup) -> None:
    """Makes a tensor of `owner` this rank's part of each of its sections along `dim`."""
    whole = getattr(owner, name)
    parts = [one.chunk(ranks.size, dim)[ranks.rank] for one in whole.detach().split(list(sections), dim)]
    kept = torch.cat(parts, dim)
    setattr(owner, name, nn.Parameter(kept, requires_grad=False) if isinstance(whole, nn.Parameter) else kept)


def _divide_sizes(owner: Any, names: Iterable[str], ranks: RankGroup) -> None:
    """Divides the attributes of `owner` that have these names, if it has them, by the number of ranks."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, getattr(owner, name) // ranks.size)


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _keep_quantised(module: WeightPart, style: str, ranks: RankGroup) -> None:
    """Keeps this rank's part of a quantised weight, which transformers' loader does not see."""
    if "colwise" in style:
        size, sections = module.out_features, 2 if style.startswith("packed") else 1
        each = size // sections
        spans = [(one * each, each) for one in range(sections)]
        module.keep(0, [_span(begin, count, ranks) for begin, count in spans])
    elif "rowwise" in style:
        module.keep(1, [_span(0, module.in_features, ranks)])
        if ranks.rank > 0:
            module.of = module.of.without_bias()


def _own_experts(experts: DivisibleExperts, style: str, ranks: RankGroup) -> DivisibleExperts:
    """Returns this rank's part of quantised experts: some of them, or a part of each one's layers."""
    num_outputs, num_inputs = experts.layer_shape
    if style == "grouped_gemm":
        return experts.some(*_span(0, experts.num, ranks))
    if "colwise" in style:  # gate and up are layers of their own
        return experts.part(0, [_span(0, num_outputs, ranks)])
    return experts.part(1, [_span(0, num_inputs, ranks)]) if "rowwise" in style else experts


def _span(begin: int, count: int, ranks: RankGroup) -> tuple[int, int]:
    """Returns where this rank's part of a section begins, and its size."""
    size = rank_part_size(count, ranks)
    own = min(ranks.rank * size, count)
    return begin + own, min(size, count - own)


def _keep_head(module: nn.Linear | WeightPart, text: PreTrainedConfig, ranks: RankGroup) -> None:
    """Keeps the outputs of the one K/V head that the query heads of this rank read."""
    size = module.out_features // text.num_key_value_heads
    begin = ranks.rank * text.num_key_value_heads // ranks.size * size
    if isinstance(module, WeightPart):
        return module.keep(0, [(begin, size)])
    part = PlainWeight.load(module).shard(begin, size)
    module.weight = nn.Parameter(part.dense(), requires_grad=False)
    if part.bias is not None:
        module.bias = nn.Parameter(part.bias, requires_grad=False)
    module.out_features = size


def _embed(module: Any, ranks: RankGroup, ids: Tensor) -> Tensor:
    """The forward pass of an embedding of which each rank has consecutive tokens: the last one the rest."""
    own = ids - ranks.rank * rank_part_size(module.num_embeddings, ranks)
    is_here = (own >= 0) & (own < len(module.weight))
    found = type(module).forward(module, torch.where(is_here, own, 0))
    return ranks.sum(found * is_here[..., None])


def _summed(module: nn.Module, ranks: RankGroup, *args: Any, **kwargs: Any) -> Tensor:
    """The forward pass of a module that returns this rank's term of its output."""
    return ranks.sum(type(module).forward(module, *args, **kwargs))


def _of_own_experts(module: Any, ranks: RankGroup, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The forward pass of experts of which this rank has consecutive ones. Those of other ranks have an index
    that transformers leaves out, and no weight."""
    own = indices - ranks.rank * module.num_experts
    is_here = (own >= 0) & (own < module.num_experts)
    own = torch.where(is_here, own, module.num_experts)
    return ranks.sum(type(module).forward(module, x, own, weights * is_here))
