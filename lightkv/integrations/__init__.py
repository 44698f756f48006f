"""Adapters to other people's models. Import the one you need: each needs the library that it adapts to."""
