"""The records that travel between clients, actors, policies and the engine."""
