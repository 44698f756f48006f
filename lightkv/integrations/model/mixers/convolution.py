"""The causal convolution in front of a recurrence, over the passes of a step, with the inputs before it in a
state."""

from torch import Tensor, nn

from lightkv.memory.kv_spec import StateTensor
from lightkv.memory.state_passes import StatePass
from lightkv.triton_kernels.states.causal_conv import Convolution, causal_conv, causal_conv_reference


def state_of(conv: nn.Conv1d) -> StateTensor:
    """Returns the state of a convolution: the inputs before the next token, `[width - 1, D]`."""
    return StateTensor("convolution", (conv.weight.shape[-1] - 1, conv.weight.shape[0]), conv.weight.dtype)


def convolve(
    conv: nn.Conv1d, x: Tensor, one: StatePass, state: Tensor, activation: str | None, out: Tensor
) -> None:
    """Writes the depthwise convolution `conv` of the tokens of a pass to their places in `out`, of the shape of
    x `[T, D]`, and the last inputs of each piece to `state`, `[num_slots, width - 1, D]`. `activation`: "silu"
    or None."""
    function = causal_conv if x.is_cuda else causal_conv_reference
    x, out = one.own(x, out)
    function(x, Convolution(conv.weight[:, 0], conv.bias, activation), state, one.rows, out)
