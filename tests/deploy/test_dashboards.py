"""Dashboards and alerts name what the service exports, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from deploy import chart, grafana
from serve_app.ops.metric_catalogue import catalogue
from tests.promql import SCRAPE_LABELS, Metrics, vectors

DEPLOY = Path(grafana.__file__).parent
CHART = Path(chart.CHART)
DECLARED = list(itertools.chain(*catalogue().values()))
METRICS = Metrics(DECLARED)
LEGEND_LABEL = re.compile(r"{{\s*([a-z_]+)\s*}}")


def dashboard_queries() -> Iterator[tuple[str, str, str]]:
    """(where, expression, legend) of every query."""
    for path in sorted((DEPLOY / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]


def alerts() -> Iterator[tuple[str, dict[str, object]]]:
    for path in sorted((DEPLOY / "alerts").glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                yield rule["alert"], rule


def test_dashboards_are_made_from_their_source() -> None:
    files = grafana.files()
    assert {p.name for p in files} == {p.name for p in (DEPLOY / "dashboards").glob("*")}
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, "run `python deploy/grafana.py`"


@pytest.mark.parametrize("folder", ["dashboards", "alerts"])
def test_the_chart_ships_them_word_for_word(folder: str) -> None:
    ours = {p.name: p.read_bytes() for p in (DEPLOY / folder).iterdir()}
    shipped = {p.name: p.read_bytes() for p in (CHART / folder).iterdir()}
    assert ours, folder
    assert shipped == ours, "run `make chart`"


def test_every_panel_reads_what_is_there() -> None:
    wrong = [
        f"{where}: {problem} in {expression}"
        for where, expression, _ in dashboard_queries()
        for problem in METRICS.problems(expression)
    ]
    assert not wrong, "\n".join(wrong)


def test_exits_that_only_draft_are_seen() -> None:
    """By default no token leaves early, and the other panels of exits stay flat."""
    shown = " ".join(e for where, e, _ in dashboard_queries() if where.startswith("exits: "))
    for name in ("drafted_tokens_total", "accepted_drafts_total", "exit_use"):
        assert f"quadriga_{name}{{" in shown


def test_every_panel_reads_the_chosen_releases_alone() -> None:
    for where, expression, _ in dashboard_queries():
        for selector in vectors(promql.parse(expression)):
            values = [m.value for m in selector.matchers.matchers if m.name == "job"]
            assert values == ["$job"] and 'job=~"$job"' in expression, (where, selector.name)


def test_joins_keep_services_apart() -> None:
    joins = [j for _, e, _ in dashboard_queries() for j in re.findall(r"on \(([^)]+)\)", e)]
    assert joins and all({"job", "namespace"} < set(labels.split(", ")) for labels in joins)


def test_legends_name_labels_that_their_queries_have() -> None:
    every = SCRAPE_LABELS.union(*(metric.labels for metric in DECLARED))
    for where, expression, legend in dashboard_queries():
        for label in LEGEND_LABEL.findall(legend):
            assert label in every, (where, label)
            grouped = re.search(r"by \(([^)]*)\)", expression)
            assert grouped is None or label in grouped[1].split(", "), (where, label)
    names = [(where, legend) for where, _, legend in dashboard_queries()]
    assert [name for name in names if names.count(name) > 1] == [], "which line is which?"


def test_every_alert_reads_what_is_there_and_says_what_it_means() -> None:
    rules = list(alerts())
    assert len({name for name, _ in rules}) == len(rules) > 10
    for name, rule in rules:
        part, *whole = map(str, str(rule["expr"]).split(" / "))
        counted = re.compile(r"rate\((\w+)")
        if name == "QuadrigaRefusesRequests":  # once a request, and not by its key's limits
            assert 'refused_total{reason=~"overloaded|kv_cache_exhausted|ingress_full"}' in part
        else:
            assert all(counted.findall(each) == counted.findall(part) for each in whole), name
        assert name != "QuadrigaMigrationsFail" or 'outcome=~"moved|failed|unknown"' in whole[0]
        assert name != "QuadrigaKVTransportFails" or "aborted|no_route|not_here|refused|" in part
        assert name != "QuadrigaServerErrors" or 'code=~"5.[^4]|INTERNAL|' in part, "not the 504s"
        assert not METRICS.problems(str(rule["expr"])), name
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name  # type: ignore[index]
        assert set(rule["annotations"]) == {"summary", "description"}, name  # type: ignore[call-overload]
        assert re.fullmatch(r"\d+[smh]", str(rule.get("for", "1m"))), name


def test_each_part_without_a_replica_is_told() -> None:
    rules = dict(alerts())
    for name, role in (
        ("QuadrigaNoDecodeReplica", "decode"),
        ("QuadrigaNoPrefillReplica", "prefill"),
    ):
        ready = f'quadriga_replicas{{role=~"{role}|mixed", phase="ready"}}'
        assert rules[name]["expr"] == f"sum({ready}) == 0"
        assert rules[name]["labels"] == {"severity": "critical"}


def test_each_dashboard_is_one_that_grafana_takes() -> None:
    seen = set()
    for path in (DEPLOY / "dashboards").glob("*.json"):
        page = json.loads(path.read_text(encoding="utf-8"))
        seen.add(page["uid"])
        assert len(page["uid"]) <= 40
        [_, job] = page["templating"]["list"]
        assert (job["name"], job["allValue"]) == ("job", ".*")
        assert job["query"]["query"] == "label_values(quadriga_replicas_desired, job)"
        ids = [panel["id"] for panel in page["panels"]]
        assert len(ids) == len(set(ids))
        for panel in page["panels"]:
            grid = panel["gridPos"]
            assert grid["x"] + grid["w"] <= grafana.COLUMNS
            assert panel["datasource"]["uid"] == "${datasource}"
            has_least = "min" in panel["fieldConfig"]["defaults"]
            assert has_least == (panel["title"] != "Profit of splits"), "which splits may cost"
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(rate(quadriga_requests_totals[5m]))", "no metric"),
        ("sum by (model) (quadriga_slots)", "grouped by"),
        ('quadriga_slots{pool="a"}', "no label pool"),
        ("rate(quadriga_slots[5m])", "is a gauge"),
        ("sum(quadriga_requests_total)", "is a counter"),
        ("rate(vllm:time_to_first_token_seconds[5m])", "no metric"),
        (
            "histogram_quantile(0.9, sum by (model_name) "
            "(rate(vllm:time_to_first_token_seconds_bucket[5m])))",
            "without le",
        ),
        ("quadriga_slots and on (zone) quadriga_slots", "one side lacks"),
        ("sum((quadriga_slots)", "does not parse"),
    ],
)
def test_the_check_finds_what_is_wrong(expression: str, problem: str) -> None:
    assert any(problem in found for found in METRICS.problems(expression))
