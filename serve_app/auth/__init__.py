"""API keys, rate limits and concurrency limits."""
