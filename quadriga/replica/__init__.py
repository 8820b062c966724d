"""What a replica has around its loop, without Ray.

engine_thread  the thread that owns the runner, and the commands that others send it
forecasting    a decode replica's forecast
handoff_receiver  the destination's side of hand-offs and migrations: leases, parts, commit
resizing       its depth changes while it serves
spans          the stages of its sequences, as traces
gc_tuning      garbage collection in a process that serves
"""
