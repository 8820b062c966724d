"""Commands that the documents show against a running service do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, SERVICE, SLOW_SERVICE, of_kind, run_page, scratch
from tests.e2e.conftest import Service

HTTP, ADMIN, GRPC = "http://127.0.0.1:8000", "http://127.0.0.1:8001", "127.0.0.1:9000"


def names(kind: str) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in of_kind(kind)]


def run(page: Path, kind: str, service: Service, folder: Path) -> None:
    here = {HTTP: service.base_url, ADMIN: service.admin_url, GRPC: service.grpc_target}
    variables = {"QUADRIGA_API_KEY": service.key}
    run_page(page, kind, scratch(folder), replace=here, variables=variables)


@pytest.mark.parametrize("page", of_kind(SERVICE), ids=names(SERVICE))
def test_commands_run(page: Path, service: Service, tmp_path: Path) -> None:
    if not service.admin_url:
        pytest.skip("the service that QUADRIGA_E2E_HTTP names has no known admin port")
    run(page, SERVICE, service, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", of_kind(SLOW_SERVICE), ids=names(SLOW_SERVICE))
def test_slow_commands_run(page: Path, service: Service, tmp_path: Path) -> None:
    run(page, SLOW_SERVICE, service, tmp_path)
