"""Faults injected into a running service, one cell of a matrix after the other."""
