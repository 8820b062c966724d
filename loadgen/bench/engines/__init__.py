"""Offline generation speed of our engine and of others, each in a process of its own."""
