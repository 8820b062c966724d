"""How KV caches move between replicas: one protocol, a module for each way.

`gloo` moves bytes over a private process group for each pair of replicas; `object_store` moves
them through Ray. `auto` is gloo, with the object store for a peer whom gloo does not reach. NCCL
for GPUs takes its place beside them: the same `KVTransport`, and a receiving half that feeds a
`KVSink`.
"""
