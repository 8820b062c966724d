"""How it is sent and recorded, byte by byte: HTTP and gRPC."""
