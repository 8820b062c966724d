"""OpenAI's asyncio client: many requests at once. Each argument is a question."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

URL = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("QUADRIGA_API_KEY", "none")
QUESTIONS = sys.argv[1:] or [
    "What is the capital of France?",
    "What do bees make?",
    "Why is the sky blue?",
]


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:

        async def ask(question: str) -> str:
            answer = await client.chat.completions.create(
                model="quadriga-auto",
                messages=[{"role": "user", "content": question}],
                max_completion_tokens=64,
                temperature=0,
            )
            return answer.choices[0].message.content

        texts = await asyncio.gather(*map(ask, QUESTIONS))
        for question, text in zip(QUESTIONS, texts, strict=True):
            print(f"{question} -> {text.strip()}")


asyncio.run(main())
