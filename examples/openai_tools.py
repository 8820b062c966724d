"""A function that the model asks to have called, and an answer read as a class."""

import json
import os
import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))
question = " ".join(sys.argv[1:]) or "Is it raining in Rome?"
messages = [{"role": "user", "content": question}]
weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
answer = client.chat.completions.create(
    model="quadriga-auto",
    messages=messages,
    tools=[weather],
    tool_choice="required",
    seed=1,
    parallel_tool_calls=False,
)
message = answer.choices[0].message
call = message.tool_calls[0]
print(call.function.name, json.loads(call.function.arguments))


class Weather(BaseModel):
    """What the second answer is read as."""

    is_raining: bool
    sky: Literal["clear", "cloudy"]


result = {"role": "tool", "tool_call_id": call.id, "content": "light rain, 12 degrees"}
parsed = client.chat.completions.parse(
    model="quadriga-auto", messages=[*messages, message, result], response_format=Weather, seed=1
)
print(parsed.choices[0].message.parsed)
