"""The service under test, the fault agent inside its cluster, and what its processes hold."""
