"""The experiments of the DREX paper."""
