"""Benchmarks that run request traces, in the simulator and in real time on one machine."""
