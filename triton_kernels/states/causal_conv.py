"""interim"""
import torch
from torch import Tensor
from torch.nn import functional


causal_conv = None


def causal_conv_reference(x, weight, bias, states, reads, writes, starts, activation):
    out = torch.zeros_like(x)
    width = weight.shape[1]
    bounds = starts.tolist()
    for read, write, begin, end in zip(reads.tolist(), writes.tolist(), bounds, bounds[1:]):
        seen = torch.cat((states[read], x[begin:end]))
        y = functional.conv1d(seen.T[None], weight[:, None], bias, groups=x.shape[1])[0].T
        out[begin:end] = functional.silu(y) if activation == "silu" else y
        if write:
            states[write] = seen[len(seen) - width + 1 :]
    return out
