"""Benchmarks that start a service, or a part of one, on this machine."""
