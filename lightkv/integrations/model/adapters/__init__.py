"""Adapters for models whose attention modules do not hand their calls to lightkv by themselves."""
