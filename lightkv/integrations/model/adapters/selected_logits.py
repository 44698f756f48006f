"""Makes models compute the logits of wanted tokens alone whose forward passes take no logits_to_keep."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightkv.integrations.model.context import argument_names
from lightkv.integrations.model.token_positions import counting_embeddings


class SelectedLogits:
    """The forward pass of a model, with logits_to_keep: the model's head gets the wanted tokens alone."""

    def __init__(self, model: PreTrainedModel, head: nn.Module) -> None:
        """Chooses the input of the `head` of one `model`."""
        self._model = model
        self._wanted: Tensor | None = None
        head.register_forward_pre_hook(self._select)

    def __call__(self, *args: Any, logits_to_keep: Tensor | int = 0, **kwargs: Any) -> Any:
        """Runs the model's own forward pass. `logits_to_keep`: the tokens, int64 `[n]`; a number for all."""
        self._wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        try:
            return type(self._model).forward(self._model, *args, **kwargs)
        finally:
            self._wanted = None

    def _select(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        return None if self._wanted is None else (args[0].index_select(1, self._wanted),)


def select_logits(model: PreTrainedModel) -> None:
    """Makes `model` take logits_to_keep, where it does not, and has a head. One that takes no positions and
    counts none is refused, and stays as it is."""
    names = argument_names(model)
    has_positions = "position_ids" in names or counting_embeddings(model)
    if "logits_to_keep" in names or not has_positions or "forward" in vars(model):
        return
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    head: Any = next(filter(None, (part.get_output_embeddings() for part in parts)), None)
    if head is not None:
        model.forward = SelectedLogits(model, head)


def selects_logits(model: PreTrainedModel) -> bool:
    """Returns whether `select_logits` has changed `model`."""
    return isinstance(vars(model).get("forward"), SelectedLogits)
