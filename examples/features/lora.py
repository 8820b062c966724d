"""LoRA adapters: the models that have a parent are adapters, and each is chosen by its name."""

import os
import sys

from openai import OpenAI

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))
question = " ".join(sys.argv[1:]) or "What is the capital of France?"
adapters = [model for model in client.models.list() if getattr(model, "parent", None)]
if not adapters:
    sys.exit("there are no adapters here: start the service with adapters=FOLDER")
for adapter in adapters:
    for name in (adapter.parent, adapter.id):
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": question}], max_tokens=32
        )
        print(f"{answer.model}: {answer.choices[0].message.content!r}")
