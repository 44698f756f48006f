"""The command `lightkv`."""
