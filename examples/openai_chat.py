"""OpenAI's client: a conversation, whole. Arguments are the question."""

import os
import sys

from openai import OpenAI

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
answer = client.chat.completions.create(
    model="quadriga-auto",
    messages=[{"role": "user", "content": question}],
    max_completion_tokens=64,
    temperature=0,
)
print(answer.choices[0].message.content)
print(f"{answer.model}: {answer.usage.completion_tokens} tokens")
