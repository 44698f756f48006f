"""What crosses the processes of a service, and how much of it may wait in each."""
