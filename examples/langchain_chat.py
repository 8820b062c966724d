"""LangChain: a chain with a prompt template, whole and as a stream."""

import os
import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
url = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
model = ChatOpenAI(
    base_url=f"{url}/v1",
    api_key=os.environ.get("QUADRIGA_API_KEY", "none"),
    model="quadriga-auto",
    temperature=0,
    max_tokens=64,
    stream_usage=True,
)
chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | model

answer = chain.invoke({"question": question})
print(answer.content)
print(
    f"{answer.usage_metadata['output_tokens']} tokens, {answer.response_metadata['finish_reason']}"
)
pieces = [piece.content for piece in chain.stream({"question": question})]
print("the stream says the same:", "".join(pieces) == answer.content)
