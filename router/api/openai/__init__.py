"""OpenAI's protocol: its requests, its answers, and the document that describes them."""
