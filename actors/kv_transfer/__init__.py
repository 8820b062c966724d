"""KV caches between replicas: hand-off after prefill, and migration."""
