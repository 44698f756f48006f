"""The API process: HTTP routes, requests, answers and metrics."""
