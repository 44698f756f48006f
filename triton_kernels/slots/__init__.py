"""Kernels that allocate and free slots. Imports nothing: `lightkv.errors` needs the flags without torch."""
