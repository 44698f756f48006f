"""Request traces: simulated, and in real time on one machine."""
