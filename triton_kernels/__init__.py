"""Kernels over raw tensors: they know torch, Triton and shapes, and no class of lightkv.

Each file holds a public function, its kernel(s) and a plain-torch twin (`*_reference`), which is the
specification that the tests hold the kernel to.
"""
