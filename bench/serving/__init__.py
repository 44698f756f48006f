"""Benchmarks of the engine and of the whole service."""
