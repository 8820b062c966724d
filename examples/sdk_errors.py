"""The SDK's errors, timeouts and retries."""

import os

from quadriga.client import Client, RetryPolicy
from quadriga.errors import DeadlineExceeded, InvalidRequest, Unauthenticated

target = os.environ.get("QUADRIGA_GRPC", "127.0.0.1:9000")
patient = RetryPolicy(max_attempts=8, first_pause_s=0.2, max_pause_s=20)

with Client(target, api_key=os.environ["QUADRIGA_API_KEY"], retry=patient) as client:
    try:
        client.generate("hi", temperature=3)
    except InvalidRequest as error:
        print(f"{error.code}, field {error.param}: {error.message}")
    try:
        client.generate("Count from 1 to 500.\n", max_tokens=1900, ignore_eos=True, timeout_s=0.2)
    except DeadlineExceeded as error:
        print(f"{error.code}: {error.message}")
    # The same request id names the same request: it never runs twice, also if asked for again.
    first = client.generate("hi", request_id="example-1", max_tokens=8, temperature=1)
    again = client.generate("hi", request_id="example-1", max_tokens=8, temperature=1)
    print("the same answer:", first.text == again.text)

with Client(target, api_key="wrong") as client:
    try:
        client.models()
    except Unauthenticated as error:
        print(f"{error.code}: {error.message}")
