"""Weights: where they are stored, how they are loaded and shared."""
