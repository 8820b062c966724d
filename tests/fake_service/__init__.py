"""Fake services for tests and for measuring the generator; they can misbehave on purpose."""
