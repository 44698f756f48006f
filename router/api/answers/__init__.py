"""The answers to a request as they are generated, and what writes them as JSON."""
