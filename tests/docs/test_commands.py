"""Commands and configurations in the documents work, or are as right as can be seen from here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import (
    DOCUMENTS,
    KINDS,
    LANGUAGES,
    ROOT,
    RUN,
    SLOW,
    Fence,
    Shown,
    check_printed,
    commands,
    fences,
    of_kind,
    run_page,
    scratch,
)
from tests.docs.programs import check
from tests.docs.yaml_pieces import check_yaml

FENCES = [fence for page in DOCUMENTS for fence in fences(page)]
YAML = [fence for fence in FENCES if fence.language == "yaml"]
every_page = pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("fence", FENCES, ids=str)
def test_each_fence_is_of_a_kind_that_is_tested(fence: Fence) -> None:
    assert fence.language in LANGUAGES, "commands are in `sh`, everything else in `text`"
    if fence.language == "sh":
        assert fence.word in KINDS, f"behind `sh` stands one of {KINDS}"
    elif fence.language in ("", "text"):
        assert not fence.looks_like_commands(), "commands belong into a fence `sh`"


@every_page
def test_every_command_is_accepted(page: Path) -> None:
    """In the order of the page, as later commands use what earlier ones made."""
    shown = Shown(files={f.word: f.text for f in fences(page) if f.language == "yaml" and f.word})
    for fence in fences(page):
        if fence.language == "sh":
            shown.kind = fence.word
            try:
                check(fence.text, shown)
            except Exception as exc:
                raise AssertionError(f"{fence}: {exc}") from exc


@every_page
def test_commands_in_the_text_are_accepted(page: Path) -> None:
    """Those that stand in a line, unless a word of them stands for something else.

    Where only the name is said, it must be one that tells its options.
    """
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for found in re.findall(r"`((?:\.venv/bin/)?python (?:-m |deploy/)[^`]+)`", text):
        command = " ".join(found.split())
        if not re.search(r"[\[\]{}…|]|\b[A-Z][A-Z_]*\b|key=value", command):
            is_name = " -m " in command and " --" not in command
            check(f"{command} --help" if is_name else command, Shown(RUN))


@pytest.mark.parametrize("fence", YAML, ids=str)
def test_every_piece_of_yaml_is_taken_by_what_it_is_for(fence: Fence) -> None:
    check_yaml(fence.text)


@pytest.mark.parametrize("fence", [f for f in FENCES if f.language == "json"], ids=str)
def test_json_is_json(fence: Fence) -> None:
    json.loads(fence.text)


@pytest.mark.parametrize("page", of_kind(RUN), ids=names(of_kind(RUN)))
def test_commands_run(page: Path, tmp_path: Path) -> None:
    run_page(page, RUN, scratch(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", of_kind(SLOW), ids=names(of_kind(SLOW)))
def test_slow_commands_run(page: Path, tmp_path: Path) -> None:
    run_page(page, SLOW, scratch(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("frobnicate --all", "no class of command"),
        ("python -m loadgen plan", "can be run"),
        ("curl http://127.0.0.1:8000/health", "can be run"),
        ("python -m loadgen chaos --rums 3", "--rums"),
        ("python -m serve_app decode.max_slotz=3", "max_slotz"),
        ("make serve ARGS='decode.max_slots=0'", "max_slots"),
        ("make sever", "sever"),
        ("make chaos QUIK=1", "QUIK"),
        ("pip install 'quadriga[clients]'", "clients"),
        ("export QUADRIGA_APIKEY=1", "QUADRIGA_APIKEY"),
        ("ray start --heat", "--heat"),
        ("serve deploy deploy/serve/nowhere.yaml", "nowhere.yaml"),
        ("serve run serve_app.app:build decode_replicas=0", "decode_replicas"),
        ("helm install quadriga helm/quadriga --set grpc.enabled=true", "needs API keys"),
        ("helm install quadriga helm/quadriga --dry-ruin", "--dry-ruin"),
        ("kubectl apply --filename nowhere.yaml", "nowhere.yaml"),
        ("kubectl get rayservces", "rayservces"),
        ("docker build --file deploy/Dockerfile --target tpu .", "tpu"),
        ("echo 'open", "nterminated"),
    ],
)
def test_the_check_finds_what_is_wrong(text: str, problem: str) -> None:
    if text.startswith("helm") and "grpc" in text:
        pytest.importorskip("helm_python")
    with pytest.raises(Exception, match=problem):
        check(text, Shown())


def test_commands_are_taken_apart() -> None:
    text = "A=1 one 'a b' \\\n  --x=y | two > out && export P=$(three -m)  # not this\n"
    found = list(commands(text))
    assert [c.words for c in found] == [
        ("one", "a b", "--x=y"),
        ("two",),
        ("export", "P=$"),
        ("three", "-m"),
    ]
    assert found[0].variables == {"A": "1"}
    assert found[1].writes == ("out",)


@pytest.mark.parametrize(("shown", "is_there"), [("a … 3", True), ("3\na", False), ("b", False)])
def test_what_is_printed_is_compared(shown: str, is_there: bool) -> None:
    fence = Fence(DOCUMENTS[0], 1, "sh", RUN, "", shown)
    if is_there:
        check_printed(fence, "a 1 2  3")
        return
    with pytest.raises(AssertionError, match="does not print"):
        check_printed(fence, "a 1 2  3")
