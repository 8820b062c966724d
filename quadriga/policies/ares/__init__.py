"""ARES: place by predicted length, and move running sequences before replicas overload.

settings     the constants, and what moving costs
forecast     rows over the horizon, on the replica that holds the sequences
cluster      packed snapshots to arrays
selection    which replica gives, which takes, and which move is best: exact
rescheduler  the tick
placement    where a prefilled sequence goes
drift        when predictions are not to be believed
recording    snapshots and decisions to a file, and again from it
"""
