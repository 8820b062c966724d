"""The terminal view, and the figures of the rescheduling benchmark."""

from __future__ import annotations

import argparse
import io
import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from loadgen import watch
from loadgen.__main__ import main
from loadgen.bench.cluster import paced_cluster, rescheduling
from loadgen.bench.cluster.rescheduling_report import (
    PolicyRun,
    count_differences,
    figures,
    headline,
    step_variances,
)
from loadgen.report.metrics import Distribution, LoadSummary
from quadriga.config.loader import load_config
from quadriga.core.migration import MigrationReport
from quadriga.errors import ConfigError
from quadriga.policies.ares.replica_view import replica_view
from tests.unit.loadgen.conftest import Service
from tests.unit.policies.test_ares_governor import uneven
from tests.unit.serve_app.dashboard_views import REQUESTS


def view(*, moves: int = 1) -> dict[str, Any]:
    order = {
        "sequence_id": "abcdefghijklmnop",
        "source": "q:decode:0:aa",
        "destination": "q:decode:1:b",
        "cause": "balance",
        "gain": 0.25,
        "num_tokens": 400,
        "remaining_tokens": 120.0,
        "depth_class": "m@8",
        "at_unix_s": 90.0,
    }
    done = asdict(MigrationReport("s", "refused", "no_room: full", stall_s=0.02))
    return {
        "at_unix_s": 100.0,
        "mode": "ares",
        "placement": "current_load",
        "replicas": [replica_view(s, now_unix_s=100.0) for s in uneven()],
        "outcomes": {"refused": moves},
        "lengths": {
            "m": {"coverage": 0.7, "mean_error_tokens": 30.0, "num_ended": 9, "is_distrusted": True}
        },
        "last_tick": {"why": {"m@8": "1 ordered, by the forecast"}},
        "recent": [order | {"report": done}] * moves + [order | {"report": None}],
    }


def shown(
    seen: dict[str, Any], moves: int = 12, width: int = 160, before: dict[str, Any] | None = None
) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(watch.frame(seen, moves=moves, width=width, before=before))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_view_shows_replicas_forecasts_and_moves() -> None:
    text = shown(view())
    for part in (
        "rescheduling ares",
        "1 ordered, by the forecast",
        "busy",
        "idle0",
        "never",
        "decode 0",
        "refused (no_room: full)",
        "under way",
        "10 s",
        "25%",
        "predictions do not hold",
    ):
        assert part in text, part


def test_the_newest_moves_come_first_and_no_more_than_asked_for() -> None:
    text = shown(view(moves=30), moves=5)
    assert text.count("abcdef") + text.count("ghijklmnop") >= 5
    assert text.count("refused (no_room") == 4
    assert text.index("under way") < text.index("refused (no_room")


def test_prefill_replicas_show_what_their_prompts_share() -> None:
    seen = view()
    prefill = seen["replicas"][0] | {"role": "prefill", "cached_share": None}
    assert "shared" not in shown(seen | {"replicas": [prefill, *seen["replicas"]]})
    some = prefill | {"cached_share": 0.624}
    text = shown(seen | {"replicas": [prefill, some, *seen["replicas"]]})
    assert "shared" in text and "62%" in text


def test_running_requests_are_shown_and_fit_eighty_columns() -> None:
    lines = [" ".join(x.split()) for x in shown(view() | {"requests": REQUESTS}).splitlines()]
    runs = "456789abcdef decode 0 running 64 s 412 2 s 530 (472–612) quadriga-s"
    assert runs in lines and any("pauses 2, breaches 3" in line for line in lines)
    narrow = shown({"at_unix_s": 1.0, "replicas": [], "requests": REQUESTS}, width=80)
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    named = shown(view() | {"requests": [REQUESTS[0] | {"request_id": "x[/bold]"}]})
    assert "x[/bold]" in named, "a client's name is no markup"


def test_an_empty_cluster_is_shown_too() -> None:
    assert "no decode replica" in shown({"at_unix_s": 1.0, "replicas": []})


def test_what_makes_the_figures_untrue_is_told() -> None:
    text = shown({"at_unix_s": 1.0, "replicas": [], "missing": {"q:scheduler": "it died"}})
    assert "q:scheduler does not answer: it died" in text
    old = [r | {"age_s": 30.0 * (k == 0)} for k, r in enumerate(view()["replicas"])]
    text = shown(view() | {"replicas": old, "fleet": {"error": "no GPU"}})
    assert text.count("is silent for 30 s") == 1
    assert "the configuration cannot be brought about: no GPU" in text


def test_a_clock_that_is_set_back_leaves_no_earlier_view(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [view() | {"at_unix_s": 9000.0}, view(), KeyboardInterrupt]
    monkeypatch.setattr(watch, "fetch", Mock(side_effect=looks))
    frame = Mock(return_value="")
    monkeypatch.setattr(watch, "frame", frame)
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    with pytest.raises(KeyboardInterrupt):
        watch.run(parser.parse_args(["--interval-s", "0.001"]))
    assert [call.kwargs["before"] for call in frame.call_args_list] == [None, None]


def with_exits(*counted: tuple[str, str, dict[str, float], dict[str, str]]) -> dict[str, Any]:
    """A view of decode replicas: (name, depth class, tokens by layers run, uses) each."""
    template = next(r for r in view()["replicas"] if r["role"] == "decode")
    named = [template | {"name": f"q:decode:{n}:x", "depth_class": c} for n, c, *_ in counted]
    told = {f"q:decode:{n}:x": {"tokens": t, "uses": u} for n, _, t, u in counted}
    return view() | {"replicas": named, "exits": told}


def line_of(text: str, model: str) -> str:
    title, _, rest = text.partition("exits: tokens")
    assert rest, title
    return next(
        " ".join(line.split()) for line in rest.splitlines() if line.startswith(f"{model} ")
    )


def test_exits_are_shares_of_a_models_tokens_by_layers_run() -> None:
    seen = with_exits(
        ("0", "quadriga-s@8", {"2": 30.0, "8": 10.0}, {}),
        ("1", "quadriga-s@8", {"2": 30.0, "4": 20.0, "8": 10.0}, {}),
        ("2", "quadriga-l@12", {"12": 7.0}, {"3": "not_worth_it", "6": "tested"}),
    )
    text = shown(seen)
    assert "since the start" in text
    assert line_of(text, "quadriga-s") == "quadriga-s 3.6 2: 60% 4: 20% 8: 20%"
    said = "3: 0% (does not pay now) 6: 0% 12: 100%"
    assert line_of(text, "quadriga-l") == f"quadriga-l 12.0 {said}"


def test_exits_are_those_of_the_last_seconds_where_there_were_any() -> None:
    before = with_exits(("0", "m@8", {"2": 100.0, "8": 100.0}, {}))
    now = with_exits(("0", "m@8", {"2": 100.0, "8": 130.0}, {})) | {"at_unix_s": 107.0}
    text = shown(now, before=before)
    assert "of the last 7 s" in text
    assert line_of(text, "m") == "m 8.0 2: 0% 8: 100%"
    assert "since the start" in shown(before, before=before), "no token came meanwhile"
    began_anew = with_exits(("0", "m@8", {"2": 1.0, "8": 3.0}, {}))
    assert line_of(shown(began_anew, before=before), "m") == "m 6.5 2: 25% 8: 75%"


def test_recent_exits_are_those_of_the_replicas_seen_before_whichever_have_gone() -> None:
    before = with_exits(("0", "m@8", {"8": 900.0}, {}), ("1", "m@8", {"8": 100.0}, {}))
    now = with_exits(("0", "m@8", {"8": 910.0}, {}), ("2", "m@8", {"2": 500.0}, {}))
    assert line_of(shown(now, before=before), "m") == "m 8.0 2: 0% 8: 100%"
    assert line_of(shown(now), "m") == "m 5.9 2: 35% 8: 65%"


def test_a_service_that_is_away_is_told_once_above_the_last_good_view(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = [view(), *[ConfigError("it is away")] * 3, KeyboardInterrupt]
    monkeypatch.setattr(watch, "fetch", Mock(side_effect=looks))
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    with pytest.raises(KeyboardInterrupt):
        watch.run(parser.parse_args(["--interval-s", "0.001"]))
    printed = capsys.readouterr().out
    assert printed.count("it is away") == 1 and "rescheduling ares" in printed


def test_without_exits_there_is_no_table_of_them() -> None:
    assert "exits" not in shown(view())


def test_it_fits_eighty_columns() -> None:
    uses = {str(k): "full_depth_asked" for k in range(1, 12)}
    seen = with_exits(
        ("0", "quadriga-s@8", {"2": 3000.0, "4": 100.0, "8": 70.0}, {"4": "tested"}),
        ("17", "quadriga-l@12", {"12": 5.0}, uses),
    )
    replicas = [
        r
        | {
            "num_running": 31,
            "num_waiting": 12,
            "num_paused": 2,
            "tokens_per_s": 2345.6,
            "step_s": 0.1234,
            "used_tokens": r["kv_capacity_tokens"],
            "is_draining": True,
        }
        for r in seen["replicas"] + view()["replicas"]
    ]
    for some in (seen["replicas"], replicas):
        lines = shown(seen | {"replicas": some}, width=80).splitlines()
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines), "nothing is cut off"
    text = shown(seen | {"replicas": replicas}, width=80)
    for part in ("decode quadriga-l@12", "decode 17*", "31+10/", "* draining", "100%", "2346"):
        assert part in text, part
    assert line_of(text, "quadriga-l").endswith("1 to 11: 0% (full depth asked) 12: 100%")


def test_without_an_admin_port_it_says_what_to_do() -> None:
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    with pytest.raises(ConfigError, match=r"admin\.port"):
        watch.run(parser.parse_args(["--once", "--url", "http://127.0.0.1:9"]))


def test_another_port_of_the_service_is_told(service: Service) -> None:
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    with pytest.raises(ConfigError, match=r"answered 404: .*; is that the admin port\?"):
        watch.run(parser.parse_args(["--once", "--url", service()[0]]))


def run(policy: str, tpots_ms: list[float], *, texts: dict[int, str], moved: int = 0) -> PolicyRun:
    tpots = [t / 1e3 for t in tpots_ms]
    summary = LoadSummary(requests=len(tpots), ok=len(tpots), tpot=Distribution.of(tpots))
    report = asdict(MigrationReport("s", "moved", stall_s=0.03))
    return PolicyRun(
        policy,
        summary,
        tpots,
        tpots,
        [1.0 if moved else 4.0],
        texts,
        {"outcomes": {"moved": moved} if moved else {}, "recent": [{"report": report}] * moved},
        0,
    )


def test_figures_are_over_all_runs_and_the_headline_compares_the_ends() -> None:
    off = run("off", [20.0, 40.0], texts={0: "a", 1: "b"})
    ares = [run("ares", [20.0, 20.0], texts={0: "a", 1: text}, moved=2) for text in ("b", "c")]
    results = {"off": figures([off]), "ares": figures(ares)}
    assert results["ares"]["moves"] == {"moved": 4}
    assert results["ares"]["move_stall_p50_ms"] == 30.0
    found = headline(results, ["off", "ares"])
    assert found["p99_tpot_reduction"] == pytest.approx(1 - 20 / 39.8, abs=1e-3)
    assert found["step_variance_reduction"] == 0.75
    assert found["moved"] == 4
    assert count_differences([off, *ares]) == 1


def test_variance_is_between_replicas_that_run() -> None:
    def sample(*steps: tuple[float, int]) -> dict[str, Any]:
        rows = [{"role": "decode", "step_s": s, "num_running": n} for s, n in steps]
        return {"replicas": [*rows, {"role": "prefill", "step_s": 9.0, "num_running": 1}]}

    found = step_variances([sample((0.01, 1), (0.02, 1), (0.5, 0)), sample((0.01, 1), (0.02, 0))])
    assert found == pytest.approx([25.0])


def test_a_killed_benchmark_has_kept_the_runs_that_were_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = PolicyRun("off", LoadSummary(ok=3), [0.1], [], [], {0: "a"}, {}, 0)
    monkeypatch.setattr(rescheduling, "_measure", Mock(side_effect=[done, KeyboardInterrupt]))
    words = ["bench", "rescheduling", "--duration-s", "1", "--out", str(tmp_path)]
    assert main(words) == 130
    kept = tmp_path / "rescheduling.partial.json"
    assert [row["summary"]["ok"] for row in json.loads(kept.read_text())["rows"]] == [3]
    monkeypatch.setattr(
        rescheduling, "_measure", lambda _, policy, *__: replace(done, policy=policy)
    )
    assert main(words) == 0
    assert not kept.exists() and len(json.loads((tmp_path / "rescheduling.json").read_text())) == 6


def test_a_service_that_ends_under_way_is_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(paced_cluster, "started_service", lambda *_, **__: nullcontext())
    lost = Mock(side_effect=ConnectionError("GET /cluster: refused"))
    monkeypatch.setattr(paced_cluster, "run_event_loop", lost)
    args = argparse.Namespace(model="quadriga-s", decode=3, slow=1, out=tmp_path)
    with pytest.raises(ConfigError, match=r"refused; .*service-off\.log has what"):
        paced_cluster.play(args, "off", Mock())


@pytest.mark.parametrize("policy", list(rescheduling.POLICIES))
def test_the_benchmarks_settings_are_a_configuration(policy: str) -> None:
    parser = argparse.ArgumentParser()
    rescheduling.add_arguments(parser)
    args = parser.parse_args(["--duration-s", "5", "--rate", "8"])
    settings = dict(s.split("=", 1) for s in rescheduling.settings_of(args, policy, 9999))
    values = {k: int(v) if v.isdigit() else v for k, v in settings.items()}
    config = load_config(values)
    wanted = dict(setting.split("=", 1) for setting in rescheduling.POLICIES[policy])
    assert config.scheduler.ares.mode == wanted["scheduler.ares.mode"]
    assert config.scheduler.placement == wanted["scheduler.placement"]
    specs = rescheduling.make_specs(args)
    assert specs == rescheduling.make_specs(args) and len(specs) == 40
    fast_s, args.slow = specs[-1].arrival_s, 4
    assert "decode.pace=ares-qwen7b-4090d-short*4" in rescheduling.settings_of(args, policy, 9999)
    assert rescheduling.make_specs(args)[-1].arrival_s == pytest.approx(4 * fast_s)
    assert rescheduling.slo_of(args).ttft_s == 20.0
