"""What operators of the service see of each request: its id, its line in the log and its spans."""
