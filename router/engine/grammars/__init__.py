"""Which grammars a device compiles, and in which order."""
