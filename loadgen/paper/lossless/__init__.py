"""Exits that draft: what they gain, and that no token differs."""
