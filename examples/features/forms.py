"""Answers of a given form: one of several words, an expression, a JSON schema."""

import json
import os
import sys

from openai import OpenAI

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))
question = " ".join(sys.argv[1:]) or "Is Rome the capital of Italy?"
messages = [{"role": "user", "content": question}]
for form in ({"choice": ["yes", "no"]}, {"regex": "[0-9]{4}"}):
    answer = client.chat.completions.create(
        model="quadriga-auto", messages=messages, extra_body={"structured_outputs": form}
    )
    print(form, "->", answer.choices[0].message.content)
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model="quadriga-auto",
    messages=messages,
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
)
print("keys:", sorted(json.loads(answer.choices[0].message.content)))
