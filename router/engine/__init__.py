"""The engine: which requests run, and what the device does in each step. No torch and no I/O."""
