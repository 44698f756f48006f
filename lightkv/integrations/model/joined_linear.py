"""Linear layers of one input joined into one product, whose weight holds the weights of the parts.

The parameters of the parts become views of the joined ones, so a model takes no more memory than before, and
its parameters keep their names.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightkv.triton_kernels.layers.linear import linear, tickets_for


def has_hooks(module: nn.Module) -> bool:
    """Returns whether `module` has hooks, or a forward pass other than its class's."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def is_plain(module: nn.Module) -> bool:
    """Returns whether `module` is exactly an nn.Linear, which may be computed in another way."""
    if type(module) is not nn.Linear or has_hooks(module):
        return False
    return all(type(parameter) is nn.Parameter for parameter in module.parameters())


class JoinedLinear(nn.Module):
    """Computes linear layers of one input as one product: maps `[..., C]` to `[..., sum of their outputs]`.

    `linear` is the joined layer. Layers without a bias get one of zeros if another one has a bias. `join` makes
    this; it stands in no model, but belongs to the forward pass that uses it.
    """

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._places = [(parent, name) for name in names]
        parts = [cast(nn.Linear, getattr(parent, name)) for name in names]
        self.sizes = [part.out_features for part in parts]
        weight = _join([part.weight for part in parts])
        self.linear: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if any(part.bias is not None for part in parts):
            zeros = weight.new_zeros
            biases = [part.bias if part.bias is not None else zeros(part.out_features) for part in parts]
            self.linear.bias = nn.Parameter(_join(biases), requires_grad=False)
        self.eval()

    @property
    def parts(self) -> list[nn.Module]:
        """The layers that were joined; where they were released, what stands in their places."""
        return [getattr(parent, name) for parent, name in self._places]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear(x))

    def release_parts(self) -> None:
        """Puts a JoinedPart in the place of each part, so that the model holds the joined weight alone.

        For a CPU, where `linear` is then replaced by a packed layer: views of the plain weight would keep it.
        """
        begin = 0
        for (parent, name), size in zip(self._places, self.sizes, strict=True):
            if not isinstance(getattr(parent, name), JoinedPart):
                setattr(parent, name, JoinedPart(self, begin, size))
            begin += size


class JoinedPart(nn.Module):
    """Stands in a model for the part of a JoinedLinear whose outputs begin at `begin`."""

    def __init__(self, joined: JoinedLinear, begin: int, size: int) -> None:
        super().__init__()
        self.joined = joined
        self.out_features = size
        self._begin = begin
        self.eval()

    @property
    def in_features(self) -> int:
        return cast(int, self.joined.linear.in_features)

    @property
    def weight(self) -> Tensor:
        """The weight of the part, `[out_features, in_features]`; a copy if the joined weight is packed."""
        return cast(Tensor, self.joined.linear.weight).narrow(0, self._begin, self.out_features)

    @property
    def bias(self) -> Tensor | None:
        bias = cast(Tensor | None, self.joined.linear.bias)
        return None if bias is None else bias.narrow(0, self._begin, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the whole product, and returns the outputs of the part."""
        return cast(Tensor, self.joined(x)).narrow(-1, self._begin, self.out_features)


def join(parent: nn.Module, names: Sequence[str], shared: Container[nn.Parameter]) -> JoinedLinear | None:
    """Joins the linear layers of `parent` called `names`, which are given the same input.

    Returns None, with nothing changed, unless all are plain and hold their weights alone: a parameter in
    `shared` belongs to another module, too. Layers that were joined before stay in the memory they are in.
    """
    parts = [getattr(parent, name) for name in names]
    if all(isinstance(part, JoinedPart) for part in parts):
        (joined, *others) = [part.joined for part in parts]
        return joined if all(other is joined for other in others) else None
    if not all(is_plain(part) for part in parts):
        return None
    kinds = {(part.weight.dtype, part.weight.device, part.weight.shape[1]) for part in parts}
    parameters = [parameter for part in parts for parameter in part.parameters()]
    if len(kinds) > 1 or any(parameter in shared for parameter in parameters):
        return None
    return JoinedLinear(parent, names)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Returns the concatenation of `parts`, which become views of it; no copy if they are views already."""
    if (whole := _whole(parts)) is not None:
        return whole
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = view
    return joined


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns one view of what `parts` are consecutive views of; None if they are not."""
    first = parts[0].detach()
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that stand in more than one place of `model`."""
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if parameter in seen else seen).add(parameter)
    return shared


def linear_forward(module: Any, tickets: Tensor, x: Tensor) -> Tensor:
    """The forward pass of a linear layer on a GPU, which picks its kernel by the number of tokens."""
    return linear(x, module.weight, module.bias, tickets)


def set_linear_forwards(roots: Iterable[nn.Module]) -> None:
    """Gives plain linear layers on a GPU, among `roots` and their parts, the forward pass `linear_forward`."""
    # Products run one after the other, so those of one shape can share their tickets.
    tickets: dict[tuple[torch.device, int], Tensor] = {}
    for module in (module for root in roots for module in root.modules()):
        if is_plain(module) and (weight := cast(nn.Linear, module).weight).is_cuda:
            key = weight.device, len(weight)
            if key not in tickets:
                tickets[key] = tickets_for(weight)
            module.forward = partial(linear_forward, module, tickets[key])


def reset_forwards(root: nn.Module, functions: Sequence[Callable[..., Any]]) -> None:
    """Gives the parts of `root` whose forward pass is a partial of one of `functions` that of their class."""
    for module in root.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func in functions:
            del module.forward
