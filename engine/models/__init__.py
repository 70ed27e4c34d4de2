"""Models from Hugging Face folders: configuration, weights, conversion, identity."""
