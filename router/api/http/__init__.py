"""HTTP: the server, its limits and guards, bodies within bounds, and streams."""
