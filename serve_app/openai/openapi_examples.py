"""Examples of the OpenAPI page."""

from __future__ import annotations

from typing import Any

from quadriga import errors

CREATED = 1_767_225_600
SERVED = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
_CAME_ABOUT = {
    "exits": {"30": 8},
    "rebuilds": 0,
    "migrations": 0,
    "pauses": 0,
    "breaches": 0,
    "lowered": 0,
    "predicted": [{"choice": 0, "tokens": 9.4, "lower": 4.0, "upper": 21.0}],
}
USAGE = {
    "prompt_tokens": 37,
    "completion_tokens": 8,
    "total_tokens": 45,
    "prompt_tokens_details": {"cached_tokens": 0},
    "quadriga": _CAME_ABOUT,
}
MODEL = {
    "id": "quadriga-auto",
    "object": "model",
    "created": CREATED,
    "owned_by": "quadriga",
    "root": SERVED,
    "parent": None,
    "max_model_len": 8192,
}
ANSWERS: dict[str, Any] = {
    "/health": {"status": "ok", "models": [SERVED]},
    "/live": {"status": "alive"},
    "/ping": "",
    "/version": {"version": "0.1.0"},
    "/load": {"server_load": 3, "num_running": 4, "num_waiting": 0},
    "/metrics": "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n",
    "/metrics/endpoint": "# TYPE vllm:num_requests_waiting gauge\n"
    'vllm:num_requests_waiting{model_name="smollm2-135m-instruct"} 2.0\n',
    "/v1/models": {"object": "list", "data": [MODEL | {"id": SERVED}, MODEL]},
    "/v1/models/{model}": MODEL,
    "/tokenize": {"tokens": [52, 81, 84], "count": 3, "max_model_len": 8192},
    "/detokenize": {"prompt": "The capital of France is"},
    "/v1/embeddings": {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -1.5, 0.125]}],
        "model": SERVED,
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    },
    "/v1/completions": {
        "id": "cmpl-5f0c1d",
        "object": "text_completion",
        "created": CREATED,
        "model": SERVED,
        "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    },
    "/v1/chat/completions": {
        "id": "chatcmpl-5f0c1d",
        "object": "chat.completion",
        "created": CREATED,
        "model": SERVED,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "The capital of France is Paris.",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    },
    "/v1/responses": {
        "id": "resp_5f0c1d",
        "object": "response",
        "created_at": CREATED,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": SERVED,
        "output": [
            {
                "type": "message",
                "id": "msg_5f0c1d_0",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {
                        "type": "output_text",
                        "text": "The capital of France is Paris.",
                        "annotations": [],
                        "logprobs": [],
                    }
                ],
            }
        ],
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": {
            "input_tokens": 37,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 8,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 45,
            "quadriga": _CAME_ABOUT,
        },
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    },
}
"""Of each path."""
STREAM = 'data: {"id":"cmpl-5f0c1d", …}\n\ndata: [DONE]\n\n'
EVENTS = 'event: response.created\ndata: {"type":"response.created", …}\n\n'
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "text": {"model": "quadriga-auto", "prompt": "The capital of France is", "max_tokens": 32},
        "token ids, scored": {"prompt": [52, 81, 84], "max_tokens": 4, "logprobs": 2, "echo": True},
        "events": {
            "prompt": "Once upon a time",
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "/v1/chat/completions": {
        "one turn": {
            "model": "quadriga-auto",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_completion_tokens": 32,
        },
        "a tool": {
            "messages": [{"role": "user", "content": "Is it raining in Rome?"}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "parameters": {
                            "type": "object",
                            "properties": {"city": {"type": "string"}},
                            "required": ["city"],
                        },
                    },
                }
            ],
            "tool_choice": "required",
        },
        "parts": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Why is the sky blue?"}]},
            ],
            "max_tokens": 16,
            "temperature": 0.7,
            "seed": 7,
        },
    },
    "/v1/responses": {
        "text": {"model": "quadriga-auto", "input": QUESTION, "max_output_tokens": 32},
        "a schema": {
            "input": [{"role": "user", "content": QUESTION}],
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "capital",
                    "schema": {"type": "object", "properties": {"city": {"type": "string"}}},
                }
            },
        },
    },
    "/v1/embeddings": {
        "texts": {"input": ["The capital of France is", QUESTION], "normalize": True},
        "ids": {"input": [52, 81, 84], "encoding_format": "base64", "pooling": "last"},
    },
    "/tokenize": {
        "text": {"prompt": "The capital of France is"},
        "messages": {"messages": [{"role": "user", "content": QUESTION}]},
    },
    "/detokenize": {"ids": {"tokens": [52, 81, 84]}},
}
"""Of each path that takes a body."""
ERRORS: dict[type[errors.QuadrigaError], str] = {
    errors.InvalidRequest: "temperature: Input should be less than or equal to 2 (got 3)",
    errors.Unauthenticated: "the API key is not known here",
    errors.Forbidden: "the API key 'alice' is not an admin's",
    errors.UnknownModel: f"model 'gpt' is not served here; served: {SERVED} (or 'quadriga-auto')",
    errors.RequestTimeout: "the body was not here within 30 s",
    errors.BodyTooLarge: "the body is larger than the limit of 4000000 bytes",
    errors.Overloaded: "the queues are full; retry in 1 s",
    errors.HeadersTooLarge: "the request has 140 headers, above the limit of 100",
    errors.InvariantViolation: "an internal error (KeyError); see the server's log",
    errors.Unavailable: "no replica is ready",
    errors.TakenOver: "the request was resumed elsewhere, and goes on there",
    errors.DeadlineExceeded: "the request was not done within its deadline of 5 s",
}
