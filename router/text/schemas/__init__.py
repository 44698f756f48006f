"""JSON schemas: their references, and what they say of parameters that are written as plain texts."""
