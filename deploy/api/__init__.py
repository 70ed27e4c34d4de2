"""The OpenAI-compatible HTTP API over ``cluster.client.EngineClient``."""
