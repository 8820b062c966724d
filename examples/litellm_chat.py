"""LiteLLM: the service as an OpenAI-compatible provider. Arguments are the question."""

import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices are not looked up

import litellm

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
common = {
    "model": "openai/quadriga-auto",
    "api_base": f"{url}/v1",
    "api_key": os.environ.get("QUADRIGA_API_KEY", "none"),
    "messages": [{"role": "user", "content": question}],
    "max_tokens": 64,
    "temperature": 0,
}
answer = litellm.completion(**common)
text = answer.choices[0].message.content
print(text)
print(f"{answer.usage.completion_tokens} tokens, {answer.choices[0].finish_reason}")
pieces = [
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **common)
]
print("the stream says the same:", "".join(pieces) == text)
try:
    litellm.completion(**(common | {"temperature": 3}))
except litellm.BadRequestError:
    print("a bad request is a BadRequestError")
