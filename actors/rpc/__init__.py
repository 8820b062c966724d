"""Calls between actors, how actors are found, and how their processes start and end."""
