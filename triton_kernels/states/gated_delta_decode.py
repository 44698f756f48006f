"""interim"""
import torch
from torch.nn import functional


gated_delta_decode = None


def gated_delta_decode_reference(qkv, a, b, a_log, dt_bias, states, reads, writes, num_k_heads, beta_scale=1.0):
    n, (_, hv, dk, dv) = len(qkv), states.shape
    q, k, v = qkv.split((num_k_heads * dk, num_k_heads * dk, hv * dv), dim=-1)
    heads = lambda x: (lambda y: y*(y.square().sum(-1,keepdim=True)+1e-6).rsqrt())(x.float().view(n, num_k_heads, dk)).repeat_interleave(hv // num_k_heads, 1)
    q, k, v = heads(q) * dk**-0.5, heads(k), v.float().view(n, hv, dv)
    decay = (-a_log.float().exp() * functional.softplus(a.float() + dt_bias)).exp()
    beta = b.sigmoid().float() * beta_scale
    state = states[reads] * decay[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * delta[..., None, :]
    written = writes > 0
    states[writes[written]] = state[written]
    return (state * q[..., None]).sum(-2).to(qkv.dtype)
