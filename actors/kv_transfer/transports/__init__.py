"""How KV caches move between replicas: one protocol, and a way for each kind of machine.

`nccl` moves bytes between GPUs, `gloo` between host memories, both over a private channel for each
ordered pair of replicas (`pairs`, `sending`, `receiving`, `line`); `object_store` through Ray.
`auto` takes the first of them that reaches a peer. Each feeds a `KVSink` at the receiving end.
"""
