"""Who may call the service: API keys, and the host names of requests."""
