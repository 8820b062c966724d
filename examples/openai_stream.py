"""OpenAI's client: text as it comes, with the usage at the end. Arguments are the question."""

import os
import sys

from openai import OpenAI

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
stream = client.chat.completions.create(
    model="quadriga-auto",
    messages=[{"role": "user", "content": question}],
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.completion_tokens} tokens")
