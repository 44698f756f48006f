"""Benchmarks of the allocator and the ledger, and of what pages cost."""
