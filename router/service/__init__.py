"""The processes of the service: the launcher, the router and the worker, and the messages between them."""
