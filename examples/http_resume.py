"""Takes up a stream that broke, over plain HTTP: nothing is generated twice, no token is lost."""

import json
import os
import urllib.request
import uuid

URL = os.environ.get("QUADRIGA_URL", "http://127.0.0.1:8000")
HEADERS = {
    "content-type": "application/json",
    "authorization": f"Bearer {os.environ.get('QUADRIGA_API_KEY', 'none')}",
    "idempotency-key": uuid.uuid4().hex,  # the same for every attempt at this request
}
BODY = {
    "prompt": "Once upon a time",
    "max_tokens": 60,
    "temperature": 1,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


def read(start: int, stop: int) -> tuple[int, str]:
    """Read the stream from token `start`; hang up after `stop` tokens."""
    headers = HEADERS | {"x-resume-index": str(start)}
    request = urllib.request.Request(f"{URL}/v1/completions", json.dumps(BODY).encode(), headers)
    num_tokens, text = start, ""
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                num_tokens += len(choice["token_ids"])
                text += choice["text"]
            if num_tokens >= stop:
                break
    return num_tokens, text


had, beginning = read(0, 10)
total, rest = read(had, BODY["max_tokens"])
_, whole = read(0, BODY["max_tokens"])
print(f"{had} tokens, then {total - had} more; one text: {beginning + rest == whole}")
