"""ARES: place by predicted length, and move running sequences before replicas overload.

settings     the constants, and what moving costs
forecast     rows over the horizon, on the replica that holds the sequences
cluster      packed snapshots to arrays; which replica gives, and which takes
search       which move is best: exact
rescheduler  the tick
overload     what a full cluster does instead
depth_pools  shallow and deep sequences apart
placement    where a prefilled sequence goes
governor     the tick with what is remembered; when predictions are not to be believed
recording    snapshots and decisions to a file, and again from it
"""
