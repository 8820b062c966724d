"""OpenAI's client: which of some texts is nearest to a question. Arguments are the question."""

import os
import sys

from openai import OpenAI

url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUADRIGA_API_KEY", "none"))

texts = ["Sort: 9 4 1 5", "Reverse: 8 2 6", "Count from 2 to 9."]
question = " ".join(sys.argv[1:]) or "Sort: 3 1 2"
answer = client.embeddings.create(
    model="quadriga-auto", input=[question, *texts], extra_body={"normalize": True}
)
asked, *others = [row.embedding for row in answer.data]
for text, vector in zip(texts, others, strict=True):
    likeness = sum(a * b for a, b in zip(asked, vector, strict=True))
    print(f"{likeness:.3f} {text}")
print(f"{answer.model}: {len(asked)} numbers, {answer.usage.prompt_tokens} tokens")
