"""Attention of many queries of each request: the kernels, one of them for Hopper, and their plan."""
