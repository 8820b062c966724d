"""The experiment of the BATON paper."""
