"""Benchmarks of the attention kernels, and the tuning of their launches."""
