"""Benchmarks of the features on the cache: generate, LightKVCache, speculation, streaming."""
