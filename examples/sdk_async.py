"""The SDK with asyncio: many streams at once."""

import asyncio
import os

from quadriga.client import AsyncClient

TARGET = os.environ.get("QUADRIGA_GRPC", "127.0.0.1:9000")


async def main() -> None:
    async with AsyncClient(TARGET, api_key=os.environ["QUADRIGA_API_KEY"]) as client:

        async def ask(numbers: str) -> str:
            prompt = f"Reverse: {numbers}\n"
            pieces = [
                piece.text async for piece in client.stream(prompt, max_tokens=32, temperature=0)
            ]
            return "".join(pieces).strip()

        questions = ["5 6 7", "1 2 3 4", "9 8"]
        texts = await asyncio.gather(*map(ask, questions))
        for question, text in zip(questions, texts, strict=True):
            print(f"{question} -> {text}")


asyncio.run(main())
