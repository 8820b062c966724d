"""KV parts between two replicas over channels of their own, without Ray.

payload       the bytes of a part, and their digest
channel       what a channel is: frames, verdicts, and the bytes of parts
channel_ends  the threads that send and receive
pairs         a channel for each ordered pair of replicas
gloo          between host memories
nccl          between GPUs: nccl_pair over the calls of nccl_library

Each feeds a `KVSink` at the receiving end. `actors.kv_transfer.transport_hub` adds Ray's object
store, and takes the first way that reaches a peer.
"""
