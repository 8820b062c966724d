"""What moves a sequence and its KV between replicas: hand-off, migration, rebuilding."""
