"""The experiments of the HELIOS paper."""
