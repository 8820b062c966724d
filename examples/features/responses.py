"""OpenAI's Responses: a whole answer, a stream, and a second turn with the first one sent along."""

import os
import sys

from openai import OpenAI

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))
question = " ".join(sys.argv[1:]) or "What is the capital of France?"
said = [{"role": "user", "content": question}]
first = client.responses.create(
    model="quadriga-auto", input=said, temperature=0, max_output_tokens=64, store=False
)
print(first.output_text)
said += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": question}]
with client.responses.stream(
    model="quadriga-auto", input=said, temperature=0, max_output_tokens=64, store=False
) as events:
    for event in events:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    usage = events.get_final_response().usage
print(f"\n{usage.output_tokens} tokens")
