"""Models from Hugging Face folders: what they are (config), what they weigh (weights), how they are made (prepare)."""
