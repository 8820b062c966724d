"""The SDK over gRPC: a whole answer, and what there is to know about it."""

import os
import sys

from quadriga.client import Client, Message

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
target = os.environ.get("QUADRIGA_GRPC", "127.0.0.1:9000")
with Client(target, api_key=os.environ["QUADRIGA_API_KEY"], timeout_s=60) as client:
    for model in client.models():
        print(f"{model.id}: up to {model.max_model_len} tokens")
    answer = client.generate([Message("user", question)], max_tokens=64, temperature=0)
    print(answer.text)
    print(f"{answer.usage.completion_tokens} tokens, by layers run: {dict(answer.usage.exits)}")
    print(answer.choices[0].finish_reason)
