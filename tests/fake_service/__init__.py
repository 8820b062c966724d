"""Fake services for tests of the load generator; they can misbehave on purpose."""
