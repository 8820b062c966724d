"""What the OpenAPI page says, held against the service by generated requests.

Valid and invalid ones: no answer may be a 500, undocumented, or of another form than documented,
and what the page forbids must be refused.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from serve_app.openai.openapi import OPERATIONS, Operation
from tests.e2e.conftest import Service

EXAMPLES_PER_ROUTE = int(os.environ.get("QUADRIGA_OPENAPI_EXAMPLES", "25"))
MAX_TOKENS = 8
DEADLINE_MS = 60_000
"""Within one millisecond nothing can be done, and that is said with 504."""
LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
SEED = 20_260_101
# Without a body there is nothing to get wrong.
MODES = [(op, GenerationMode.POSITIVE) for op in OPERATIONS]
MODES += [(op, GenerationMode.NEGATIVE) for op in OPERATIONS if op.body is not None]
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="session")
def api(service: Service) -> Any:
    return schemathesis.openapi.from_url(f"{service.base_url}/openapi.json")


def test_every_route_is_on_the_page(api: Any) -> None:
    found = {(r.ok().method, r.ok().path) for r in api.get_all_operations()}
    assert found == {(op.method, op.path) for op in OPERATIONS}


def shorten(body: dict[str, Any], route: Operation) -> None:
    """Ask for few tokens, which show what many do, and with time enough."""
    if isinstance(body.get("deadline_ms"), int | float):
        body["deadline_ms"] = DEADLINE_MS
    at_least = body.get("min_tokens")
    most = max(MAX_TOKENS, at_least if isinstance(at_least, int) else 0)
    assert route.body is not None
    for name in LENGTHS & route.body.model_fields.keys():
        asked = body.get(name)
        body[name] = min(asked, most) if isinstance(asked, int) else most


@pytest.mark.parametrize(("route", "mode"), MODES, ids=lambda value: getattr(value, "path", value))
def test_the_page_tells_the_truth(api: Any, route: Operation, mode: GenerationMode) -> None:
    operation = api[route.path][route.method.upper()]

    @hypothesis.seed(SEED)
    @settings(
        max_examples=EXAMPLES_PER_ROUTE,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def exchange(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            shorten(case.body, route)
        case.call_and_validate(checks=CHECKS, timeout=60)

    exchange()
