"""OpenAI's asyncio client: many requests at once."""

import asyncio
import os

from openai import AsyncOpenAI

URL = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("QUADRIGA_API_KEY", "none")


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:

        async def ask(numbers: str) -> str:
            answer = await client.completions.create(
                model="quadriga-auto", prompt=f"Reverse: {numbers}\n", max_tokens=32, temperature=0
            )
            return answer.choices[0].text

        questions = ["5 6 7", "1 2 3 4", "9 8"]
        texts = await asyncio.gather(*map(ask, questions))
        for question, text in zip(questions, texts, strict=True):
            print(f"{question} -> {text.strip()}")


asyncio.run(main())
