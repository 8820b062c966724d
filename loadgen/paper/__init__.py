"""The papers' experiments, run on the real engine: `python -m loadgen paper drex` and others."""
