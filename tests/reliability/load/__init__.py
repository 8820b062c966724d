"""Clients that send streams while faults are injected, and what they received."""
