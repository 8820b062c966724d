"""KV that prompts which begin alike share."""
