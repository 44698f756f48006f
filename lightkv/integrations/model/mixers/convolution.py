"""The causal convolution in front of a recurrence, over a pass, with the inputs before it in a state."""

from torch import Tensor, nn

from lightkv.memory.state_passes import StatePass
from lightkv.triton_kernels.states.causal_conv import causal_conv, causal_conv_reference


def convolve(conv: nn.Conv1d, x: Tensor, one: StatePass, state: Tensor, activation: str | None) -> Tensor:
    """Returns the depthwise convolution `conv` of the tokens x `[T, D]` of a pass, and puts the last inputs of
    each piece into `state`, `[num_slots, width - 1, D]`. `activation`: "silu" or None."""
    function = causal_conv if x.is_cuda else causal_conv_reference
    slots = one.slots
    weight = conv.weight[:, 0]
    return function(x, weight, conv.bias, state, slots.reads, slots.writes, one.starts, activation)
