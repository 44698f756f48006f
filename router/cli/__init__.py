"""The command `lightkv`, and the demo."""
