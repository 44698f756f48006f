"""OpenAI's protocol: its requests, its answers, and the OpenAPI document that describes them."""
