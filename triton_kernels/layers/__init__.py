"""Kernels of a transformer layer's parts around attention: norms, activations and matrix products."""
