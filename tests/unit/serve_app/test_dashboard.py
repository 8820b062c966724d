"""The live page without a browser: its files, its data, and what its logic makes of them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
import quickjs

from quadriga.errors import ReplicaDied
from quadriga.metrics import MetricsHub
from serve_app.admin import AdminDoor
from serve_app.cluster import RayCluster
from serve_app.dashboard_pages import FILES, FOLDER
from tests.unit.serve_app.conftest import MakeStand, Stand
from tests.unit.serve_app.dashboard_views import NAMES, busy_view, counted, crowded_view

IDLE: dict[str, Any] = {"at_unix_s": 0.0, "replicas": []}


def run(function: str, *arguments: Any) -> Any:
    """Call one of the page's pure functions."""
    context = quickjs.Context()
    context.eval((FOLDER / "view.js").read_text(encoding="utf-8") + "\n;globalThis.View = View;")
    context.set("given", json.dumps(arguments))
    return json.loads(context.eval(f"JSON.stringify(View.{function}(...JSON.parse(given)))"))


def client(stand: Stand) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(AdminDoor(stand.desk).application())
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_its_files_come_under_a_strict_policy(stand: Stand) -> None:
    async with client(stand) as http:
        for path, (_, content_type) in FILES.items():
            reply = await http.get(path)
            assert reply.status_code == 200
            assert reply.headers["content-type"] == content_type.decode()
            assert "default-src 'none'" in reply.headers["content-security-policy"]
            assert "unsafe" not in reply.headers["content-security-policy"]
            assert reply.headers["x-content-type-options"] == "nosniff"


async def test_its_files_need_no_key_and_answer_no_foreign_name(make_stand: MakeStand) -> None:
    remote = await make_stand(config={"admin.host": "0.0.0.0", "admin.port": 8001})
    async with client(remote) as http:
        assert (await http.get("/dashboard")).status_code == 200
        assert (await http.get("/cluster")).status_code == 401
    local = await make_stand()
    async with client(local) as http:
        for path in FILES:
            reply = await http.get(path, headers={"host": "rebound.example"})
            assert reply.status_code == 403


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        text = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"https?://|//[a-z]+\.", text), path.name
        assert "innerHTML" not in text and "eval(" not in text, path.name
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)


async def test_however_many_look_the_actors_are_asked_rarely(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def operators_view() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return IDLE

    monkeypatch.setattr(stand.cluster, "operators_view", operators_view)
    async with client(stand) as http:
        for _ in range(20):
            assert (await http.get("/cluster")).json() == IDLE
    assert asked == 1


async def test_a_part_whose_actor_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = object.__new__(RayCluster)
    cluster._scheduler, cluster._controller = "q:scheduler", "q:controller"

    async def called(self: RayCluster, name: str, method: str, **_: Any) -> dict[str, Any]:
        if name == "q:scheduler":
            raise ReplicaDied("q:scheduler died")
        return {"exits": {"d": {}}}

    monkeypatch.setattr(RayCluster, "_call", called)
    view = await cluster.operators_view()
    assert view["missing"] == {"q:scheduler": "q:scheduler died"}
    assert view["exits"] == {"d": {}}
    assert view["replicas"] == []
    assert run("troubles", view) == ["q:scheduler does not answer: q:scheduler died"]


def test_the_answer_is_small_and_plain() -> None:
    text = json.dumps(busy_view(with_helios=True), allow_nan=False)
    assert len(text) < 20_000


def test_exits_come_out_of_the_hub() -> None:
    view = counted()
    assert view[NAMES[1]]["tokens"] == {"2": 800.0, "4": 1800.0, "6": 500.0, "8": 240.0}
    assert view[NAMES[2]]["breaches"] == 14.0
    assert MetricsHub().values("quadriga_exit_tokens_total") == {}


def test_an_idle_service_can_be_shown() -> None:
    for function in ("classes", "exits", "moves", "troubles", "decisions"):
        assert run(function, IDLE) == [], function
    assert run("helios", IDLE) is None
    assert dict(run("summary", IDLE))["replicas ready"] == "–"


def test_replicas_are_grouped_and_none_is_left_out() -> None:
    groups = run("classes", busy_view())
    assert [(g["name"], [r["name"].split(":")[1] for r in g["replicas"]]) for g in groups] == [
        ("not loaded yet", ["decode"]),
        ("quadriga-s@4", ["decode"]),
        ("quadriga-s@8", ["decode", "decode", "prefill"]),
    ]
    assert groups[0]["replicas"][0]["is_silent"]


def test_of_many_replicas_those_are_listed_that_need_a_look() -> None:
    found = run("listed", crowded_view(), [], "")
    [group] = found["groups"]
    assert found["isMany"] and not group["isOpen"]
    assert [r["name"].split(":")[2] for r in group["shown"]] == ["7", "11"]
    assert group["num_hidden"] == 198
    assert group["text"].startswith("200 replicas · 1800 of 6400 sequences · KV memory 24 %")
    [group] = run("listed", crowded_view(), ["quadriga-s@8"], "")["groups"]
    numbers = [int(r["name"].split(":")[2]) for r in group["shown"]]
    assert numbers == list(range(200)), "as one counts, not 1, 10, 100"
    [group] = run("listed", crowded_view(), [], "decode 117")["groups"]
    assert [r["name"].split(":")[2] for r in group["shown"]] == ["117"]
    assert run("listed", crowded_view(), [], "prefill")["groups"] == []


def test_of_few_replicas_all_are_listed() -> None:
    found = run("listed", busy_view(), [], "")
    assert not found["isMany"]
    assert [g["num_hidden"] for g in found["groups"]] == [0, 0, 0]
    assert found["groups"][0]["text"] == "1 replica"


def test_old_figures_are_marked() -> None:
    assert run("age", {"age_s": 4.0}) is None
    assert run("age", {"age_s": 9.0})["text"] == "silent for 9.0 s"
    assert run("troubles", crowded_view()) == ["decode 7 has not reported for 9.0 s"]
    view = crowded_view()
    for replica in view["replicas"]:
        replica["age_s"] = 30.0
    assert run("troubles", view) == ["200 replicas have not reported for more than 5 s"]


@pytest.mark.parametrize(
    ("left_s", "level", "mark"),
    [(None, "good", "●"), (61, "good", "●"), (59, "warn", "▲"), (14, "bad", "■")],
)
def test_seconds_to_out_of_memory(left_s: float | None, level: str, mark: str) -> None:
    replica = {"role": "decode", "forecast": [{}], "seconds_to_full": left_s}
    found = run("urgency", replica)
    assert (found["level"], found["mark"]) == (level, mark)
    assert found["text"], "colour and mark are not all there is"


def test_exits_are_those_between_two_views() -> None:
    before, now = busy_view(), busy_view()
    now["exits"][NAMES[2]]["tokens"]["4"] += 30
    now["exits"][NAMES[2]]["tokens"]["8"] += 10
    now["exits"][NAMES[2]]["breaches"] += 4
    now["exits"][NAMES[0]]["tokens"] = {"2": 5.0}  # a new process counts from nought
    small, large = run("exits", now, before)
    assert small["name"] == "quadriga-s@4"
    assert {b["layer"]: b["share"] for b in small["bars"]} == {2: 0, 4: 0.75, 6: 0, 8: 0.25}
    assert (small["mean_depth"], small["breach_share"]) == (5.0, 0.1)
    assert (large["total"], large["mean_depth"]) == (5.0, 2.0)


def test_why_a_request_moved() -> None:
    moves = run("moves", busy_view())
    assert [m["cause"] for m in moves] == ["memory", "balance", "drain", "memory", "balance"]
    assert "decode 0 was busier than decode 1" in moves[-1]["why"]
    assert "23 % of the imbalance" in moves[-1]["why"]
    assert "not known" in moves[2]["why"]
    assert [m["result"]["level"] for m in moves] == ["warn", "none", "bad", "warn", "good"]
    assert moves[-1]["result"]["text"] == "moved, at rest for 18 ms"


def test_helios_and_its_history() -> None:
    found = run("helios", busy_view(with_helios=True))
    assert dict(found["facts"])["CBC"] == "12 of 128 tokens (9 %)"
    assert found["rows"][1][:4] == ["quadriga-l@12", "5", "200 ms", "30 ms"]
    assert found["decisions"][0]["text"] == "resize · quadriga-s@4 · covers 83 % of tokens"


def test_sparklines_stay_in_their_box() -> None:
    points = [tuple(map(float, p.split(","))) for p in run("spark", [0, 5, 20], 10, 90, 24).split()]
    assert points == [(0.0, 24.0), (45.0, 12.0), (90.0, 0.0)]
    assert run("spark", [1], 10, 90, 24) == run("spark", [1, 2], 0, 90, 24) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0042, "4.2 ms"), (0.25, "250 ms"), (7.94, "7.9 s"), (300, "5 min"), (9000, "3 h")],
)
def test_durations(value: float, text: str) -> None:
    assert run("seconds", value) == text
