"""The check of requests' grammars, in a process that may die, before they are queued."""
