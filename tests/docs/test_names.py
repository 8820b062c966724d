"""Metrics, settings, alerts, panels and anchors that the documents name are there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from deploy.chart import documented_values
from deploy.config_reference import rows, section
from deploy.grafana import DASHBOARDS
from quadriga.config.engine import PoolConfig
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.replica import ResizeOutcome
from serve_app.ops.metric_catalogue import catalogue
from serve_app.ops.metrics import ADAPTERS_INFO
from tests.docs.pages import DOCUMENTS, ROOT, fences
from tests.promql import Metrics

DECLARED = list(itertools.chain(*catalogue().values()))
METRICS = {metric.name for metric in DECLARED}
SAMPLES = (
    METRICS
    | {
        f"{metric.name}_{part}"
        for metric in DECLARED
        if metric.kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    | {ADAPTERS_INFO}
)
KEYS = {row.key for model in (QuadrigaConfig, PoolConfig) for row in rows(model)}
VALUES = {path for path, _, _ in documented_values()}
SECTIONS = {name for name, field in QuadrigaConfig.model_fields.items() if section(field)}
ALERTS = {
    rule["alert"]
    for group in yaml.safe_load((ROOT / "deploy/alerts/quadriga.yaml").read_text())["groups"]
    for rule in group["rules"]
}
OPERATORS_PAGES = ("dashboards", "install", "sizing", "troubleshooting", "tuning", "upgrade")
every_page = pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def inline_code(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    yield from re.findall(r"`([^`\n]+)`", text)


def starts(keys: set[str]) -> set[str]:
    """The keys and every section they are in."""
    return {".".join(key.split(".")[: n + 1]) for key in keys for n in range(key.count(".") + 1)}


def slug(heading: str) -> str:
    """A heading as GitHub makes an anchor of it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def is_metric(name: str) -> bool:
    """Whether it is one, or with `_` at its end (`quadriga_engine_*`) how some begin."""
    return name in SAMPLES or (name.endswith("_") and any(s.startswith(name) for s in SAMPLES))


@every_page
def test_metrics_are_in_the_catalogue(page: Path) -> None:
    found = {
        name
        for code in inline_code(page)
        for name in re.findall(r"(?<![\w.:/*-])(quadriga_[a-z0-9_]+|vllm:[a-z0-9_]+)", code)
    }
    unknown = {name for name in found if not is_metric(name)}
    assert not unknown, f"{page.name} names metrics that nobody exports"


@every_page
def test_settings_are_in_the_configuration(page: Path) -> None:
    known = starts(KEYS) | starts(VALUES)
    for code in inline_code(page):
        name = re.split(r"[:= ]", code)[0].removeprefix("config.").removesuffix(".*")
        is_dotted = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) is not None
        is_file = Path(name).suffix in (".json", ".safetensors", ".py", ".yaml")
        if is_dotted and not is_file and name.split(".")[0] in {*SECTIONS, "exits"}:
            assert name in known, f"{page.name}: `{code}` is no setting"


@every_page
def test_promql_reads_what_is_there(page: Path) -> None:
    for fence in fences(page):
        if fence.language == "promql":
            for line in fence.text.splitlines():
                assert not Metrics(DECLARED).problems(line), f"{fence}: {line}"


@every_page
def test_anchors_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#]*)#([^)]+)\)", text):
        other = page if not target else page.parent / target
        headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.M)
        assert anchor in {slug(h) for h in headings}, f"{page.name}: {target}#{anchor}"


def test_every_alert_has_a_place_in_troubleshooting() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\bQuadriga[A-Z]\w+", text)) == ALERTS
    table = text.partition("## Alerts")[2]
    assert set(re.findall(r"\bQuadriga[A-Z]\w+", table)) == ALERTS


def test_every_panel_is_explained_under_its_dashboard() -> None:
    text = (ROOT / "docs/dashboards.md").read_text(encoding="utf-8")
    chapters = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    titles = {title.removeprefix("Quadriga: "): grid for title, grid in DASHBOARDS.values()}
    assert {chapter.lower() for chapter in chapters} == {title.lower() for title in titles}
    for title, grid in titles.items():
        chapter = next(body for name, body in chapters.items() if name.lower() == title.lower())
        explained = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", chapter, re.M)
        assert explained[1:] == [panel.title for row in grid for panel in row], title


def test_outcomes_that_the_dashboards_page_names_exist() -> None:
    text = (ROOT / "docs/dashboards.md").read_text(encoding="utf-8")
    [row] = re.findall(r"^\| Changes of depth \|.*$", text, re.M)
    named = set(re.findall(r"`(\w+)`", row))
    assert named and named <= set(get_args(ResizeOutcome))


def test_panels_that_other_pages_name_exist() -> None:
    panels = {panel.title for _, grid in DASHBOARDS.values() for row in grid for panel in row}
    for name in ("tuning", "upgrade", "sizing"):
        text = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        plain = re.sub(r"^```.*?^```$|\*\*[^*]+\*\*|`[^`]+`", "", text, flags=re.M | re.S)
        named = set(re.findall(r"(?<![\w*])\*([A-Z][^*\n]+)\*", plain))
        assert named <= panels | {"Output tokens/s", "Goodput"}, name


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([a-z-]+\.md)\)", index))
    assert linked == {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_the_operators_pages_are_there() -> None:
    for name in OPERATORS_PAGES:
        assert (ROOT / f"docs/{name}.md").is_file()


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("429 Too Many Requests", "429-too-many-requests"),
        ("400, 404, 413", "400-404-413"),
        ("`engine`", "engine"),
        ("KV between GPUs", "kv-between-gpus"),
    ],
)
def test_slugs_are_githubs(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def test_names_that_are_wrong_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`quadriga_slotz`, `scheduler.rescheduling`, [x](#nowhere)")
    checks: list[Any] = [
        test_metrics_are_in_the_catalogue,
        test_settings_are_in_the_configuration,
        test_anchors_are_there,
    ]
    for wrong in checks:
        with pytest.raises(AssertionError):
            wrong(page)
