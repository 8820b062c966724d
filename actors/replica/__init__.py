"""Prefill and decode replicas: their actors, engine threads, resizing and reports."""
