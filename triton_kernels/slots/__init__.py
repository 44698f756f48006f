"""Kernels that allocate and free slots. It imports nothing, because `lightkv.errors` needs the flags without
torch."""
