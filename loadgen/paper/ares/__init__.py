"""The experiments of the ARES paper."""
