"""The error tree: every class maps to both protocols and survives a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import grpc
import pytest

from quadriga import errors
from quadriga.errors import QuadrigaError


def tree(cls: type[QuadrigaError] = QuadrigaError) -> Iterator[type[QuadrigaError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from tree(sub)


# Those that others derive for themselves never cross a border.
CLASSES = [cls for cls in tree() if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_maps_to_both_protocols(cls: type[QuadrigaError]) -> None:
    assert 400 <= cls.http_status <= 599
    assert hasattr(grpc.StatusCode, cls.grpc_code)
    assert cls.default_code
    assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_survives_a_pickle(cls: type[QuadrigaError]) -> None:
    error = cls("what happened", param="max_tokens", code="c", retry_after_s=1.5)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again == error
    assert (again.param, again.code, again.retry_after_s) == ("max_tokens", "c", 1.5)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_the_docstring_tree_tells_the_truth(cls: type[QuadrigaError]) -> None:
    assert errors.__doc__ is not None
    (line,) = (
        line
        for line in errors.__doc__.splitlines()
        if line.split() and cls.__name__ in line.split() and "`" not in line
    )
    if cls in (QuadrigaError, errors.ConfigError):
        return
    if cls is not errors.InvariantViolation:
        assert str(cls.http_status) in line
    assert cls.grpc_code in line


def test_only_retryable_errors_carry_a_promise() -> None:
    retryable = {cls for cls in CLASSES if cls.retryable}
    assert errors.Overloaded in retryable
    assert errors.InvalidRequest not in retryable
