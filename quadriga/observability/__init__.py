"""Logs, metrics, traces and the history of the load."""
