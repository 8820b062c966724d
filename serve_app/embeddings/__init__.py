"""POST /v1/embeddings: its body, the request that it is, and its answer."""
