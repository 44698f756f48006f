"""Benchmarks: each prints its floor first, then a table, then one line of JSON. README.md lists them all."""
