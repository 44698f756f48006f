"""The grammars of a service: requests that wait for one, and the thread of the worker that compiles them."""
