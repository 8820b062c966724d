"""OpenAI's client: what errors look like, and that it retries where that can help."""

import os

import openai

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = openai.OpenAI(
    base_url=f"{url}/v1",
    api_key=os.environ.get("QUADRIGA_API_KEY", "none"),
    max_retries=3,  # on 429 and 503, after what Retry-After says; never on a 400
    timeout=30,
)

try:
    client.completions.create(model="quadriga-auto", prompt="hi", temperature=3)
except openai.BadRequestError as error:
    print(f"400 {error.code}, field {error.param}: {error.body['message']}")

try:
    client.completions.create(model="no-such-model", prompt="hi")
except openai.NotFoundError as error:
    print(f"404 {error.code}")

try:
    client.completions.create(
        model="quadriga-auto",
        prompt="Count from 1 to 500.\n",
        max_tokens=1900,
        extra_body={"deadline_ms": 1, "ignore_eos": True},
    )
except openai.APIStatusError as error:
    print(f"{error.status_code} {error.code}")
