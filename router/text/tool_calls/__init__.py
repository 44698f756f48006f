"""Reads reasoning and tool calls out of the text of an answer, piece by piece."""
