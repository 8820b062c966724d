"""Loads that rise, and what their steps show."""
