"""What several benchmarks use: reports, clocks and child processes."""
