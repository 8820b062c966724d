"""Decisions as pure functions of state and time: the cluster and the simulator run the same."""
