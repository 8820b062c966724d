"""Every file in examples/ runs against the service and shows what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Service

FOLDER = Path(__file__).parents[2] / "examples"
CLIENTS_PYTHON = "QUADRIGA_CLIENTS_PYTHON"
TIMEOUT_S = 90

SORT, COUNT, REVERSE = "Sort: 7 3 9 1", "Count from 3 to 30.", ("Reverse: 5 6 7", "Reverse: 9 8")
# What each is asked, so that the answer of the model under test can be checked.
QUESTIONS = {
    "openai_stream.py": [COUNT],
    "openai_async.py": REVERSE,
    "sdk_stream.py": [COUNT],
    "sdk_async.py": REVERSE,
}
# What each must print.
EXPECTED = {
    "openai_chat.py": ["1 3 7 9", "quadriga-s: "],
    "openai_stream.py": ["3 4 5", "tokens"],
    "openai_async.py": ["5 6 7 -> Reversed: 7 6 5", "9 8 -> Reversed: 8 9"],
    "openai_errors.py": ["400 invalid_value, field temperature", "404 model_not_found", "504 dead"],
    "openai_embeddings.py": ["Reverse: 8 2 6", "quadriga-s: ", " numbers, "],
    "features/forms.py": ["['yes', 'no']} -> ", "keys: ['city', 'is_capital']"],
    "features/lora.py": ["quadriga-s: '", "quadriga-s-adapted: '"],
    "features/prefixes.py": ["salt mine: False (0 of", "salt mine: True", "another: False (0 of"],
    "features/responses.py": ["1 3 7 9", " tokens"],
    "openai_tools.py": ["weather {'city': '", "is_raining="],
    "sdk_generate.py": ["quadriga-auto: up to 2048 tokens", "1 3 7 9", "by layers run: {"],
    "sdk_stream.py": ["3 4 5", "tokens"],
    "sdk_async.py": ["5 6 7 -> Reversed: 7 6 5", "9 8 -> Reversed: 8 9"],
    "sdk_errors.py": ["field temperature", "deadline_exceeded", "same answer: True", "invalid_api"],
    "grpcurl_style.py": ["quadriga.v1.Quadriga", "GenerateOnce", "1 3 7 9"],
    "http_resume.py": ["more; one text: True"],
    "curl.sh": ['"status": "ok"', "quadriga-auto", "1 3 7 9", "data: [DONE]"],
}
# These have requirements that contradict ours, so an environment of their own.
APART = {
    "langchain_chat.py": ["1 3 7 9", "stream says the same: True"],
    "litellm_chat.py": ["1 3 7 9", "stream says the same: True", "a BadRequestError"],
}
ELSEWHERE = {"sdk_tls.py", "README.md"}  # in test_secured; no program


def run(name: str, service: Service, python: str, *questions: str) -> str:
    asked = questions or QUESTIONS.get(name, [SORT])
    command = ["sh" if name.endswith(".sh") else python, name, *asked]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QUADRIGA_")} | {
        "QUADRIGA_URL": service.base_url,
        "QUADRIGA_GRPC": service.grpc_target,
        "QUADRIGA_API_KEY": service.key,
    }
    done = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run() -> None:
    files = {
        str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files == {*EXPECTED, *APART, *ELSEWHERE}


@pytest.mark.parametrize("name", EXPECTED)
def test_example(service: Service, name: str) -> None:
    printed = run(name, service, sys.executable)
    for text in EXPECTED[name]:
        assert text in printed


def test_a_question_with_quotes_and_a_backslash_goes_through_curl(service: Service) -> None:
    assert "data: [DONE]" in run("curl.sh", service, sys.executable, 'What is "\\n"?')


@pytest.mark.parametrize("name", APART)
def test_example_with_requirements_of_its_own(service: Service, name: str) -> None:
    python = os.environ.get(CLIENTS_PYTHON)
    if python is None:
        pytest.skip("LangChain and LiteLLM contradict our pins: `make test-clients` runs this")
    printed = run(name, service, python)
    for text in APART[name]:
        assert text in printed
