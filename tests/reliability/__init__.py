"""Faults, overload and upgrades of a service under load; `python -m loadgen` runs them."""
