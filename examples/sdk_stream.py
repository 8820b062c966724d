"""The SDK over gRPC: text as it comes. A stream that breaks is taken up where it broke."""

import os
import sys

from quadriga.client import Client, Message

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
target = os.environ.get("QUADRIGA_GRPC", "127.0.0.1:9000")
with Client(target, api_key=os.environ["QUADRIGA_API_KEY"]) as client:
    for piece in client.stream([Message("user", question)], max_tokens=64, temperature=0):
        print(piece.text, end="", flush=True)
        if piece.usage is not None:
            print(f"\n{piece.usage.completion_tokens} tokens, {piece.finish_reason}")
