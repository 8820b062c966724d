"""Prompts that begin alike: the second finds the beginning computed, unless its salt is another."""

import os
import sys

from openai import OpenAI

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))
question = " ".join(sys.argv[1:]) or "What is the capital of France?"
rules = " ".join(f"Rule {i}: answer with one word." for i in range(20))
messages = [{"role": "user", "content": f"{rules} {question}"}]
for salt in ("mine", "mine", "another"):
    answer = client.chat.completions.create(
        model="quadriga-auto", messages=messages, max_tokens=8, extra_body={"cache_salt": salt}
    )
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"salt {salt}: {cached > 0} ({cached} of {usage.prompt_tokens} prompt tokens)")
