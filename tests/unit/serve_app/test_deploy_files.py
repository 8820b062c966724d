"""The Serve files of deploy/ are what Ray and we can read, and the production one is closed."""

from __future__ import annotations

import re
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

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "serve"
EXAMPLES = (
    *sorted(FOLDER.glob("*.yaml")),
    *sorted((ROOT / "helm" / "quadriga" / "examples").glob("*.yaml")),
    *sorted((ROOT / "deploy" / "kuberay").glob("*.yaml")),
)


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


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_every_example_has_the_mechanisms_on_and_says_what_each_does(path: Path) -> None:
    """DREX, BATON, both halves of ARES, and early refusal: the setting, and after it a comment."""
    text = path.read_text(encoding="utf-8")
    for setting in (
        "rebatching: drex",
        "reservation: used",
        "placement: ares",
        r"ares:( \{mode: ares\})?",
        r"max_wait_s: [\d.]+",
    ):
        assert len(re.findall(rf"(?m)^ +{setting} # \w.*\w", text)) == 1, setting
