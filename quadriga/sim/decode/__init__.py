"""Simulated decode replicas: as a service's, as vLLM's, and in lock step."""
