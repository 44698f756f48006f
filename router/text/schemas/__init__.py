"""JSON schemas: what they say of values, of plain texts and of parameters, and how they are compiled."""
