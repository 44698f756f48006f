"""The report of simulations: one HTML page with its charts and tables."""
