"""Measurements: each prints its floor first, then a table, then one line of JSON, and checks itself."""
