"""Open the client of the transport that was asked for, and close it on every path."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loadgen.options import api_key
from loadgen.runner import Live
from loadgen.wire.capture import LoadClient
from loadgen.wire.client_http import HttpClient


@asynccontextmanager
async def open_client(
    args: argparse.Namespace, http: HttpClient, live: Live
) -> AsyncIterator[LoadClient]:
    """Yield the client; HTTP keeps no connections, gRPC keeps a few channels."""
    if args.transport == "http":
        yield http
        return
    from loadgen.wire.client_grpc import GrpcClient

    client = GrpcClient(
        args.grpc,
        timeout_s=args.timeout_s,
        api_key=api_key(args),
        tls=args.grpc_tls or args.ca_file is not None,
        ca_file=args.ca_file,
        on_data=live.on_data,
    )
    try:
        yield client
    finally:
        await client.close()
