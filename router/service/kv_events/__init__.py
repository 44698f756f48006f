"""KV events: what the cache holds, published to gateways in vLLM's form over ZeroMQ (`--kv-events`)."""
