"""The live page without a browser: its files, its data, and what its logic makes of them."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import httpx
import pytest
import quickjs

from quadriga.checkpoint.exits import ExitUse
from quadriga.config.loader import load_config
from quadriga.errors import ReplicaDied
from quadriga.observability.load_history import VALUES
from quadriga.observability.metrics import MetricsHub
from serve_app.http.pages import FILES, FOLDER
from serve_app.ops.admin import AdminServer
from serve_app.request.cluster_client import ClusterClient
from tests.unit.serve_app.conftest import MakeStand, Stand
from tests.unit.serve_app.dashboard_views import NAMES, busy_view, counted, crowded_view

IDLE: dict[str, Any] = {"at_unix_s": 0.0, "replicas": []}


PURE = {"View": "view.js", "Exits": "exits.js", "Charts": "charts.js"}


def run(function: str, *arguments: Any) -> Any:
    """Call one of the page's pure functions; one without a module's name is View's."""
    context = quickjs.Context()
    for module, file in PURE.items():
        text = (FOLDER / file).read_text(encoding="utf-8")
        context.eval(f"{text}\n;globalThis.{module} = {module};")
    context.set("given", json.dumps(arguments))
    called = function if "." in function else f"View.{function}"
    return json.loads(context.eval(f"JSON.stringify({called}(...JSON.parse(given)))"))


def client(stand: Stand) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(AdminServer(stand.engine).application())
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
    cluster = object.__new__(ClusterClient)
    cluster._scheduler, cluster._controller = "q:scheduler", "q:controller"

    async def called(self: ClusterClient, name: str, method: str, **_: Any) -> dict[str, Any]:
        if name == "q:scheduler":
            raise ReplicaDied("q:scheduler died")
        return {"exits": {"d": {}}}

    monkeypatch.setattr(ClusterClient, "_call", called)
    view = await cluster.operators_view()
    assert view["missing"] == {"q:scheduler": "q:scheduler died"}
    assert view["exits"] == {"d": {}}
    assert view["replicas"] == []
    assert run("troubles", view) == ["q:scheduler does not answer: q:scheduler died"]


def test_a_part_whose_actor_is_away_is_not_shown_as_off_or_idle() -> None:
    controllers = ("fleet", "exits", "load_history", "helios")
    alone = {k: busy_view()[k] for k in ("at_unix_s", *controllers)} | {"replicas": []}
    figures = dict(run("summary", alone))
    assert figures.pop("replicas ready") == "4 of 5" and set(figures.values()) == {"–"}
    said = quiet(alone, exits=False)
    assert said["Moves"] == "the scheduler, which orders them, does not answer."
    assert "does not answer" in said["Exits"] and "HELIOS is off" in str(said)
    [*_, last] = run("classes", alone)
    assert {r["text"].partition(":")[0] for r in last["replicas"]} == {"its load is not known"}
    other = {k: v for k, v in crowded_view().items() if k not in controllers}
    said = quiet(other, exits=False)
    assert said["Choice of model and depth"] == "the controller, which chooses, does not answer."
    assert "does not answer" in said["Exits"]
    [group] = run("listed", other, [], "")["groups"]
    assert [r["name"].split(":")[2] for r in group["shown"]] == ["7", "11"], "not all 200"


def test_the_answer_is_small_and_plain() -> None:
    text = json.dumps(busy_view(with_helios=True), allow_nan=False)
    assert len(text) < 25_000


def test_exits_come_out_of_the_hub() -> None:
    view = counted()
    assert view[NAMES[1]]["tokens"] == {"2": 800.0, "4": 1800.0, "6": 500.0, "8": 240.0}
    assert view[NAMES[2]]["breaches"] == 14.0
    assert MetricsHub().values("quadriga_exit_tokens_total") == {}


def test_an_idle_service_can_be_shown() -> None:
    for function in ("classes", "Exits.byClass", "moves", "troubles", "decisions"):
        assert run(function, IDLE) == [], function
    assert run("helios", IDLE) is None
    assert run("Charts.all", IDLE) is None
    assert dict(run("summary", IDLE))["replicas ready"] == "–"


def test_replicas_are_grouped_and_none_is_left_out() -> None:
    groups = run("classes", busy_view())
    assert [(g["name"], [r["name"].split(":")[1] for r in g["replicas"]]) for g in groups] == [
        ("not loaded yet", ["decode"]),
        ("quadriga-s@4", ["decode"]),
        ("quadriga-s@8", ["decode", "decode", "prefill"]),
    ]
    assert groups[0]["replicas"][0]["is_silent"]
    view = busy_view()
    view["fleet"]["replicas"][-1]["doing"] = "reads the weights: 21%"
    assert run("classes", view)[0]["replicas"][0]["text"] == "reads the weights: 21%"


def test_of_many_replicas_those_are_listed_that_need_a_look() -> None:
    found = run("listed", crowded_view(), [], "")
    [group] = found["groups"]
    assert found["isMany"] and not group["isOpen"]
    assert [r["name"].split(":")[2] for r in group["shown"]] == ["7", "11"]
    assert group["num_hidden"] == 198
    # Decode 7 is silent: what it said last is in no sum.
    assert group["text"].startswith("200 replicas · 1791 of 6368 sequences · KV memory 24 %")
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
    assert run("troubles", crowded_view()) == ["decode 7 has not reported for more than 5 s"]
    view = crowded_view()
    for replica in view["replicas"]:
        replica["age_s"] = 30.0
    assert run("troubles", view) == ["200 replicas have not reported for more than 5 s"]
    assert [figure for _, figure in run("summary", view)[1:4]] == ["0", "0", "0"], "not of now"
    assert run("listed", view, [], "")["groups"][0]["text"] == "200 replicas"
    view = busy_view()
    view["fleet"]["last_failure"] = "q:decode:3:w: the engine failed"
    assert run("troubles", view) == ["the last replica lost: q:decode:3:w: the engine failed"]
    view["fleet"]["is_ready"] = True
    assert run("troubles", view) == []
    for replica in view["fleet"]["replicas"][:2]:
        replica["doing"] = "d is ready, and needs a prefill replica"
    said = "the roll-out waits: d is ready, and needs a prefill replica"
    assert run("troubles", view) == [said], "once for both"


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
    small, large = run("Exits.byClass", now, before)
    assert small["name"] == "quadriga-s@4"
    assert {b["layer"]: b["share"] for b in small["bars"]} == {2: 0, 4: 0.75, 6: 0, 8: 0.25}
    assert (small["mean_depth"], small["breach_share"]) == (5.0, 0.1)
    assert (large["total"], large["mean_depth"]) == (5.0, 2.0)
    for lacking in ({"exits": {}}, {}):  # nobody knows how many of its tokens are new
        assert [c["total"] for c in run("Exits.byClass", now, lacking)] == [0, 0]


def test_exits_show_what_was_lowered_and_how_well_depths_were_forecast() -> None:
    """Of the tokens between two views; a tenth in which none came is not drawn."""
    before, now = busy_view(), busy_view()
    now["exits"][NAMES[2]]["lowered"] += 3
    small, _ = run("Exits.byClass", now, before)
    assert small["depths"] == []
    assert "below it within their quality budget 3" in run("Exits.notes", small)
    for field, more in (("tokens", 10), ("expected", 31), ("run", 40)):
        now["exits"][NAMES[2]]["depths"]["0.4"][field] += more
    small, large = run("Exits.byClass", now, before)
    assert small["depths"] == [{"tokens": 10, "expected": 3.1, "run": 4, "share": 0.5}]
    small, large = run("Exits.byClass", now)
    assert [d["expected"] for d in large["depths"]] == [3.1, 7.5]
    assert large["depths"][0]["tokens"] == 200, "of two replicas"


def test_requests_that_run() -> None:
    runs, paused, lost = run("requests", busy_view())
    shown = [runs[k] for k in ("name", "model", "replica", "status", "for", "tokens")]
    assert shown == ["456789abcdef", "quadriga-s", "decode 0", "running", "64 s", "412"]
    assert (runs["predicted"], runs["to go"]) == ("530 (472 to 612)", "1.9 s (up to 3.2 s)")
    assert (paused["name"], paused["so far"]) == (f"{shown[0]} #1", "pauses 2, breaches 3")
    assert [lost[k] for k in ("replica", "predicted", "to go", "so far")] == [*"–––", "rebuilds 1"]
    assert run("requests", IDLE) == []


def test_why_a_request_moved() -> None:
    moves = run("moves", busy_view())
    assert [m["cause"] for m in moves] == ["memory", "balance", "drain", "memory", "balance"]
    assert "decode 0 was busier than decode 1" in moves[-1]["why"]
    assert "23 % of the imbalance" in moves[-1]["why"]
    assert "not known" in moves[2]["why"]
    assert [m["result"]["level"] for m in moves] == ["warn", "none", "bad", "warn", "good"]
    assert moves[-1]["result"]["text"] == "moved, at rest for 18 ms"
    assert "forecast to fill in 12 s" in moves[3]["why"] and "fill;" in moves[0]["why"]
    assert [p["name"] for p in moves[3]["places"]] == ["→ decode 1", "decode 2"]
    assert [p["share"] for p in moves[3]["places"]] == [0.4, 0.85]
    assert "work 0.50 → 0.80 · imbalance -23 %" in moves[3]["places"][0]["text"]
    assert moves[0]["places"] == []
    escalated = {"cause": "escalate", "source": NAMES[0], "destination": NAMES[1], "num_tokens": 9}
    assert "lacks layers" in run("why", escalated)
    drained = escalated | {"cause": "drain", "reason": "fewer are wanted"}
    assert "being emptied: fewer are wanted (9 tokens" in run("why", drained)


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


def exit_view(uses: list[dict[str, str]], tokens: dict[str, float]) -> dict[str, Any]:
    """Replicas of one class with their exits' state; the first one has the tokens."""
    names = [f"q:decode:{k}:x" for k in range(len(uses))]
    counters = {"breaches": 0, "involuntary_exits": 0, "involuntary_stays": 0}
    return {
        "at_unix_s": 0.0,
        "replicas": [{"name": n, "role": "decode", "depth_class": "quadriga-s@6"} for n in names],
        "exits": {
            n: {"tokens": tokens if k == 0 else {}, "uses": uses[k], **counters}
            for k, n in enumerate(names)
        },
    }


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("tested", "no token was sure enough to leave here"),
        ("not_worth_it", "DREX's plan tests no exit: at this load a full pass is cheaper"),
        ("drafts_not_worth_it", "could draft, but full passes are measured to be faster"),
        ("full_depth_asked", "requests want the full model's answer"),
        ("not_loaded", "exit not loaded: this class runs 6 layers"),
        ("off", "exits are off: decode.rebatching is off"),
        ("idle", "nothing has run here yet"),
    ],
)
def test_an_unused_exit_shows_why(use: ExitUse, words: str) -> None:
    [found] = run("Exits.byClass", exit_view([{"2": use}], {"6": 40.0}))
    two, six = found["bars"]
    assert (two["layer"], two["share"]) == (2, 0)
    assert two["why"].startswith(words)
    assert (six["share"], six["why"]) == (1, "")


def test_every_use_of_an_exit_has_a_text() -> None:
    for use in get_args(ExitUse):
        [found] = run("Exits.byClass", exit_view([{"2": use}], {}))
        assert found["bars"][0]["why"] not in ("", use)


def test_an_exit_left_out_for_others_is_marked_and_replicas_that_differ_are_counted() -> None:
    uses = [{"2": "not_worth_it", "4": "tested"}] * 2 + [{"2": "tested", "4": "tested"}]
    [found] = run("Exits.byClass", exit_view(uses, {"4": 9.0, "6": 1.0}))
    assert [b["layer"] for b in found["bars"]] == [2, 4, 6]
    assert found["bars"][0]["why"] == (
        "DREX's plan leaves it out: at this load the other exits pay more (2 of 3 replicas)"
    )
    assert found["bars"][1]["why"] == ""
    assert run("Exits.notes", found) == "mean depth 4.2 of 6"


def history(**values: list[float | None]) -> dict[str, Any]:
    lengths = {len(v) for v in values.values()}
    [num] = lengths
    empty: dict[str, list[float | None]] = {name: [None] * num for name in VALUES}
    return IDLE | {"load_history": {"interval_s": 5.0, "ended_unix_s": 0.0, **empty, **values}}


def test_charts_have_scales_and_labels() -> None:
    view = history(
        tokens_per_s=[0.0, None, 730.0, 410.0],
        ttft_p50_s=[None, None, 0.12, 0.2],
        ttft_p99_s=[None, None, 0.9, None],
    )
    tokens, under_way, ttft, token_time = run("Charts.all", view)
    assert tokens["top"] == 800
    assert [t["text"] for t in tokens["ticks"]] == ["0", "400", "800"]
    assert tokens["lines"][0]["texts"] == ["0", "–", "730", "410"]
    assert tokens["lines"][0]["label"] == "tokens/s: 410 now, 730 at most"
    assert [line["name"] for line in ttft["lines"]] == ["P50", "P99"]
    assert ttft["lines"][1]["label"] == "P99: – now, 900 ms at most"
    assert token_time["none"] == "No second token in the last ten minutes."
    assert [t["text"] for t in under_way["ticks"]] == ["0", "1"], "there are no half requests"
    assert run("Charts.pointAge", tokens, 3) == "now"
    assert run("Charts.pointAge", tokens | {"num_points": 120}, 0) == "9 min 55 s ago"


def test_without_anything_counted_there_are_no_charts() -> None:
    assert run("Charts.all", history(tokens_per_s=[None, 0.0], open_requests=[0.0, 0.0])) is None
    assert run("Charts.all", history(tokens_per_s=[None, 0.0], open_requests=[0.0, 1.0]))


def test_gaps_stay_gaps() -> None:
    stretches = run("Charts.stretches", [1, 2, None, 4, None, 0], 4, 100, 40)
    assert stretches == [[[0, 30], [20, 20]], [[60, 0]], [[100, 40]]]
    assert run("Charts.stretches", [None, None], 4, 100, 40) == []


@pytest.mark.parametrize(
    ("value", "top"), [(730, 800), (1, 1), (0.0083, 0.01), (1.01, 1.5), (9.9e9, 1e10), (8, 8)]
)
def test_scales_end_at_numbers_that_read_well(value: float, top: float) -> None:
    assert run("Charts.roundUp", value) == pytest.approx(top)


def quiet(view: dict[str, Any], charts: bool = True, exits: bool = True) -> dict[str, str]:
    lines = run("quiet", view, charts, exits)
    assert all(set(line) == {"subject", "text", "setting"} for line in lines)
    return {line["subject"]: f"{line['text']} {line['setting']}".strip() for line in lines}


def test_an_empty_panel_shows_why_in_a_line() -> None:
    replicas = [r | {"forecast": []} for r in busy_view()["replicas"]]
    default = {"at_unix_s": 0.0, "mode": "off", "replicas": replicas, "recent": [], "helios": None}
    default |= {"exits": {}}
    found = quiet(default | {"load_history": {}}, charts=False, exits=False)
    assert found == {
        "Charts": "no request in the last ten minutes; they appear with the first tokens.",
        "Exits": "no decode replica has told of its exits yet.",
        "Moves": "no moves yet, no forecasts: rescheduling is off, turn it on with "
        "scheduler.ares.mode=ares",
        "Choice of model and depth": "HELIOS is off: every model is served as configured. Turn it "
        "on with helios.enabled=true",
    }
    assert "controller, which keeps them, does not answer" in quiet(default, charts=False)["Charts"]
    on = default | {"mode": "ares"}
    assert "nothing was worth a move" in quiet(on)["Moves"]
    assert "nowhere to move to" in quiet(on | {"replicas": replicas[2:]})["Moves"]
    assert quiet(busy_view(with_helios=True)) == {}
    drained = default | {"recent": busy_view()["recent"]}
    assert list(quiet(drained)) == ["Forecasts", "Choice of model and depth"]


def test_the_settings_it_names_are_settings() -> None:
    for line in run("quiet", IDLE | {"mode": "off", "helios": None}, True, True):
        name, value = line["setting"].split("=")
        assert load_config({name: {"true": True}.get(value, value)})


def test_why_a_request_changed_sides() -> None:
    view = busy_view()
    view["recent"][-1] |= {"cause": "depth", "gain": 0.2}
    assert "tokens take 20 % less time" in run("moves", view)[0]["why"]
