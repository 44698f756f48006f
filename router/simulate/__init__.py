"""The simulator: runs traces through the real engine, with a step-time model in place of a device."""
