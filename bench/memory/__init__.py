"""Benchmarks of the allocator and the ledger, and of token granularity against pages."""
