"""Kernels that write new K/V to the cache."""
