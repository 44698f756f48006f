"""Helpers of several benchmarks: reports, clocks, child processes, random models."""
