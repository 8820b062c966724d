"""One table, two wire formats: every error class has a place in both."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quadriga.client.errors import from_rpc
from quadriga.errors import Cancelled, ConfigError, QuadrigaError, Unavailable
from serve_app.grpc.messages import set_error
from serve_app.openai.errors import as_quadriga, error_headers, error_object
from tests.unit.test_errors import CLASSES

ALL = [c for c in CLASSES if c not in (QuadrigaError, ConfigError)]


class Context:
    """What a gRPC context keeps, in the shape of a failed call."""

    def __init__(self) -> None:
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._metadata: list[tuple[str, str | bytes]] = []

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str | bytes]]) -> None:
        self._metadata = metadata

    def as_call(self) -> grpc.RpcError:
        outer = self

        class Call(grpc.RpcError):
            def code(self) -> grpc.StatusCode:
                return outer._code

            def details(self) -> str:
                return outer._details

            def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
                return outer._metadata

        return Call()


@pytest.mark.parametrize("kind", ALL)
def test_http_form(kind: type[QuadrigaError]) -> None:
    error = kind("said", param="field", retry_after_s=0.25 if kind.retryable else None)
    assert error_object(error)["error"] == {
        "message": "said",
        "type": kind.openai_type,
        "param": "field",
        "code": kind.default_code,
    }
    headers = dict(error_headers(error))
    assert (b"x-should-retry" in headers) != kind.retryable
    if kind.retryable:
        assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"1", b"250")


@pytest.mark.parametrize("kind", ALL)
def test_grpc_form_and_back(kind: type[QuadrigaError]) -> None:
    error = kind("said", param="field", retry_after_s=0.25 if kind.retryable else None)
    context = Context()
    set_error(context, error)
    call = context.as_call()
    back = from_rpc(call)
    assert back == error
    metadata = dict(context._metadata)
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (kind.default_code, "quadriga")
    if kind.retryable:
        retry = error_details_pb2.RetryInfo()
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 250


def test_codes_are_unique() -> None:
    codes = [kind.default_code for kind in ALL]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("Stream removed (RST_STREAM (Received RST_STREAM with error code 8))", Unavailable),
        ("Locally cancelled by application!", Cancelled),
        ("Channel closed!", Cancelled),
    ],
)
def test_a_call_that_a_proxy_cut_is_worth_another_try(
    details: str, kind: type[QuadrigaError]
) -> None:
    """So HAProxy ends the streams of an ingress that died; the client itself cancelled nothing."""
    context = Context()
    context.set_code(grpc.StatusCode.CANCELLED)
    context.set_details(details)
    assert type(from_rpc(context.as_call())) is kind


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "Received http2 header with status: 404", "port of gRPC"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "not done within its timeout"),
    ],
)
def test_what_grpc_says_itself_is_said_with_a_remedy(
    code: grpc.StatusCode, details: str, said: str
) -> None:
    context = Context()
    context.set_code(code)
    context.set_details(details)
    error = from_rpc(context.as_call())
    assert said in error.message
    assert error.grpc_code == code.name
    assert not error.retryable


def test_foreign_statuses_become_our_errors() -> None:
    for code in grpc.StatusCode:
        if code is grpc.StatusCode.OK:
            continue
        context = Context()
        context.set_code(code)
        assert isinstance(from_rpc(context.as_call()), QuadrigaError)


def test_foreign_exceptions_say_nothing_of_the_inside() -> None:
    error = as_quadriga(ValueError("/etc/secret"))
    assert "secret" not in error.message
    assert error.http_status == 500
