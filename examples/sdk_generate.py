"""The SDK over gRPC: a whole answer, a conversation, and what there is to know about it."""

import os

from quadriga.client import Client, Message

target = os.environ.get("QUADRIGA_GRPC", "127.0.0.1:9000")
with Client(target, api_key=os.environ["QUADRIGA_API_KEY"], timeout_s=60) as client:
    for model in client.models():
        print(f"{model.id}: up to {model.max_model_len} tokens")
    answer = client.generate("Sort: 7 3 9 1\n", max_tokens=32, temperature=0)
    print(answer.text)
    print(f"{answer.usage.completion_tokens} tokens, by layers run: {dict(answer.usage.exits)}")
    chat = client.generate([Message("user", "Reverse: 5 6 7")], max_tokens=32, temperature=0)
    print(chat.choices[0].finish_reason, chat.text)
