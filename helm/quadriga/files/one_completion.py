"""Ask the service for one completion, and check what comes back."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

RETRY_INTERVAL_S = 3.0
CALL_TIMEOUT_S = 60.0


def call(path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    headers = {"content-type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["authorization"] = f"Bearer {key.strip()}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["URL"] + path, data, headers)
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as reply:
        answer: dict[str, object] = json.load(reply)
    return answer


def one_completion() -> str:
    model = os.environ.get("MODEL")
    if not model:
        models = call("/v1/models")["data"]
        assert isinstance(models, list)
        model = models[0]["id"]
    body = {"model": model, "prompt": "Sort: 3 1 2\n", "max_tokens": 8, "ignore_eos": True}
    answer = call("/v1/completions", body)
    usage = answer["usage"]
    assert isinstance(usage, dict)
    if usage["completion_tokens"] != 8:
        raise ValueError(f"8 tokens were asked for, usage says {usage}")
    return json.dumps(answer)


def main() -> int:
    deadline_s = time.monotonic() + float(os.environ["TIMEOUT_S"])
    while True:
        try:
            print(one_completion())
            return 0
        except urllib.error.HTTPError as exc:
            reason = f"{exc.code} {exc.read().decode(errors='replace')}"
            if exc.code in (400, 401, 404, 413):
                print(f"refused: {reason}")
                return 1
        except (urllib.error.URLError, OSError) as exc:
            reason = str(exc)
        except (ValueError, KeyError, IndexError) as exc:
            print(f"not an answer: {exc!r}")
            return 1
        if time.monotonic() > deadline_s:
            print(f"no completion in time; last: {reason}")
            return 1
        time.sleep(RETRY_INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main())
