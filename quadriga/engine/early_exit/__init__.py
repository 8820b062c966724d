"""Early exits: logits at an exit, skipped KV, length heads."""
