"""Load for a running service: real traces in, strictly checked streams and a report out.

A client only: it loads neither torch nor ray. `python -m loadgen` lists the commands.
"""
