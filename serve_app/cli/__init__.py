"""The commands that start, stop and show the service."""
