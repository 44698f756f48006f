"""Benchmarks of what stands on the cache: generate, speculation, streaming, eviction."""
