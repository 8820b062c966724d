"""The SDK with asyncio: many streams at once. Each argument is a question."""

import asyncio
import os
import sys

from quadriga.client import AsyncClient, Message

TARGET = os.environ.get("QUADRIGA_GRPC", "127.0.0.1:9000")
QUESTIONS = sys.argv[1:] or [
    "What is the capital of France?",
    "What do bees make?",
    "Why is the sky blue?",
]


async def main() -> None:
    async with AsyncClient(TARGET, api_key=os.environ["QUADRIGA_API_KEY"]) as client:

        async def ask(question: str) -> str:
            stream = client.stream([Message("user", question)], max_tokens=64, temperature=0)
            return "".join([piece.text async for piece in stream])

        texts = await asyncio.gather(*map(ask, QUESTIONS))
        for question, text in zip(QUESTIONS, texts, strict=True):
            print(f"{question} -> {text}")


asyncio.run(main())
