"""Attention of each request's newest tokens: the kernels and their plan."""
