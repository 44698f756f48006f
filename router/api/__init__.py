"""The HTTP side of the service: routes, requests, answers and metrics."""
