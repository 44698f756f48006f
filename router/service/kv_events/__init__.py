"""KV events: what the cache holds, told to gateways in vLLM's form over ZeroMQ (`--kv-events`)."""
