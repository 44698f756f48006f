"""The simulator: traces through the engine, with a step-time model in place of a device."""
