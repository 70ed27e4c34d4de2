"""The OpenAI-compatible HTTP API over ``cluster.client.EngineClient``: requests in, tokens as text out."""
