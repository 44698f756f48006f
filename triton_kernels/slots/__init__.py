"""Kernels that allocate and free slots."""
