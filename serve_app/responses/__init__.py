"""POST /v1/responses: its body, its meaning as a chat, and its answers."""
