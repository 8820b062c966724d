"""The Serve files of deploy/ are what Ray and we can read, and the production one is closed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from quadriga.config.loader import load_config
from quadriga.errors import ConfigError
from serve_app.auth.api_keys import ApiKeys
from serve_app.http.tls import is_loopback
from serve_app.ops.admin import check_admin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from ray.serve.schema import ServeDeploySchema

FOLDER = Path(__file__).parents[3] / "deploy" / "serve"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.name)
def test_ray_and_we_can_read_it(path: Path) -> None:
    tree = read(path)
    ServeDeploySchema.model_validate(tree)
    for application in tree["applications"]:
        load_config(application["args"])


def test_production_is_closed() -> None:
    tree = read(FOLDER / "production.yaml")
    assert is_loopback(tree["http_options"]["host"])
    config = load_config(tree["applications"][0]["args"])
    assert config.auth.api_keys_file is not None
    with pytest.raises(ConfigError, match="admin"):  # and stays closed if the keys are left out
        check_admin(config.admin, ApiKeys())
    text = (FOLDER / "production.yaml").read_text()
    for variable in ("RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH", "QUADRIGA_TLS_CERT"):
        assert variable in text
