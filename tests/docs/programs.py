"""What can be said of a command without running it, program by program.

Each program's own parser judges: argparse, click, make. Those that are not here are in
`cluster_programs.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import click
import yaml

from deploy.config_reference import ENVIRONMENT
from quadriga.config.loader import load_config
from serve_app.cli.arguments import ServeParser
from tests.docs.cluster_programs import docker, helm, kubectl
from tests.docs.pages import ROOT, RUN, Command, Shown, commands
from tests.docs.yaml_pieces import serve_file

PYTHON = re.compile(r"(?:.*/)?python3?$")
# Modules with a parser of their own, and where it is.
MAINS = {
    "loadgen": "loadgen.__main__",
    "serve_app": "serve_app.__main__",
    "quadriga.gguf": "quadriga.gguf.__main__",
    "quadriga.training": "quadriga.training.cli",
    "quadriga.tune": "quadriga.tune.cli",
    "deploy.multinode": "deploy.multinode",
    "loadgen.bench.gpu_acceptance": "loadgen.bench.gpu_acceptance",
    "tests.architecture.report": "tests.architecture.report",
    "tests.architecture.mutants": "tests.architecture.mutants",
    "tests.simulation": "tests.simulation.__main__",
    "tests.simulation.planted": "tests.simulation.planted",
}
WITHOUT_OPTIONS = {"serve_app.http.haproxy", "serve_app.cli.demo"}
# Commands that run anywhere within seconds: a fence that shows one has a test run it.
QUICK = (("loadgen", "plan"), ("loadgen", "watch"), ("serve_app", "keys"))
VARIABLE_PREFIXES = ("RAY_", "NCCL_", "GLOO_", "OTEL_", "TRITON_", "HF_", "XDG_")
POSIX_TOOLS = {
    *("cat", "cd", "chmod", "cp", "echo", "git"),
    *("grep", "head", "ls", "mkdir", "sed", "tail"),
}


def check(text: str, shown: Shown) -> None:
    """Look at every command of a fence. Raises: AssertionError: One cannot be as it stands."""
    syntax = subprocess.run(["sh", "-n", "-c", text], capture_output=True, text=True, timeout=10)
    assert syntax.returncode == 0, syntax.stderr
    for command in commands(text):
        check_command(command, shown)
        shown.files |= dict.fromkeys(command.writes, "")


def check_command(command: Command, shown: Shown) -> None:
    for name in command.variables:
        _known_variable(name)
    if not command.words:
        return
    program, *rest = command.words
    program = program.rpartition("/")[2]
    if PYTHON.match(program):
        _python(rest, shown)
    elif program in CHECKS:
        CHECKS[program](rest, shown)
    elif program in ("curl", "openssl"):
        is_here = not any("example.com" in word for word in rest)
        assert shown.kind or not is_here, f"{program} can be run: `sh run` or `sh service`"
    else:
        assert program in POSIX_TOOLS, f"{program}: no class of command; see {__name__}"


# Ours


class _Parsed(Exception):
    """The arguments are accepted; nothing more is wanted of the program."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options


def parsed(module: str, words: Sequence[str]) -> argparse.Namespace:
    """What a program of ours makes of its arguments, stopped before it does anything.

    Raises: AssertionError: It refuses them.
    """
    original = argparse.ArgumentParser.parse_args

    with_settings = ServeParser.parse_with_settings

    def parse_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        raise _Parsed(original(self, args, namespace))

    def parse_with_settings(self: ServeParser, *given: Any) -> argparse.Namespace:
        raise _Parsed(with_settings(self, *given))

    said = io.StringIO()
    main = importlib.import_module(MAINS[module]).main
    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        patch.object(ServeParser, "parse_with_settings", parse_with_settings),
    ):
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                status = main(list(words))
        except _Parsed as accepted:
            return accepted.options
        except SystemExit as exc:
            status = exc.code
    if status == 0:  # it was asked for help
        return argparse.Namespace()
    raise AssertionError(f"{module} {' '.join(words)}: {said.getvalue()}")


def _python(words: Sequence[str], shown: Shown) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file(), f"no script {words[0]}"
        assert len(words) == 1, "scripts take no arguments here"
        return
    module, *rest = words[1:]
    is_quick = any((module, *rest)[: len(quick)] == quick for quick in QUICK)
    assert shown.kind or not is_quick, f"{module} can be run: `sh run` or `sh service`"
    if module == "pip":
        _pip(rest, shown)
    elif module == "pytest":
        for path in (w.partition("::")[0] for w in rest if w.startswith("tests/")):
            assert (ROOT / path).exists(), f"no {path}"
    elif module.partition(".")[0] in sys.stdlib_module_names:
        assert importlib.util.find_spec(module), module
    elif module in WITHOUT_OPTIONS:
        assert not rest and importlib.util.find_spec(module), module
    else:
        assert module in MAINS, f"python -m {module}: no class of command"
        options = parsed(module, rest)
        if "settings" in options:  # key=value, as the service takes them
            _settings(options, shown)


def _settings(options: argparse.Namespace, shown: Shown) -> None:
    file = getattr(options, "config", None)
    tree = yaml.safe_load(shown.text(str(file))) if file is not None else {}
    args = tree["applications"][0].get("args", {}) if "applications" in tree else tree
    load_config(args | dict(setting.split("=", 1) for setting in options.settings))


def _make(words: Sequence[str], shown: Shown) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, equals, _ in (word.partition("=") for word in words):
        assert not equals or f"$({name})" in makefile, f"the Makefile has no variable {name}"
        assert not equals or name != "QUICK" or "$(if $(QUICK)" in makefile
    done = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    for command in commands(done.stdout):
        if command.words and PYTHON.match(command.words[0]) and command.words[2] in MAINS:
            _python(command.words[1:], Shown(RUN))


def _pip(words: Sequence[str], shown: Shown) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[0] == "install", words
    for name, extra in re.findall(r"(quadriga|\.)\[([a-z,]+)\]", " ".join(words)):
        for part in extra.split(","):
            assert part in project["optional-dependencies"], f"{name} has no extra {part}"


def _export(words: Sequence[str], shown: Shown) -> None:
    for word in words:
        _known_variable(word.partition("=")[0])


def _known_variable(name: str) -> None:
    is_known = name in ENVIRONMENT or name in ("KEY", "QUADRIGA_GPU_TESTS_ON_CPU")
    assert is_known or name.startswith(VARIABLE_PREFIXES), f"nobody reads {name}"


# Ray


def _click(group: click.Group, words: Sequence[str]) -> dict[str, Any]:
    """What a click program makes of its arguments. Raises: AssertionError: It refuses them."""
    command = group.commands.get(words[0])
    assert command is not None, f"no command {words[0]}"
    try:
        return command.make_context(words[0], list(words[1:])).params
    except click.ClickException as exc:
        raise AssertionError(f"{' '.join(words)}: {exc.format_message()}") from exc


def _quietly(module: str) -> Any:
    """A module of Ray's, which warns of its own when it is imported first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def _ray(words: Sequence[str], shown: Shown) -> None:
    _click(_quietly("ray.scripts.scripts").cli, words)


def _serve(words: Sequence[str], shown: Shown) -> None:
    params = _click(_quietly("ray.serve.scripts").cli, words)
    target = params.get("config_or_import_path") or params.get("config_file_name")
    if target is None:
        return
    if str(target).endswith((".yaml", ".yml")):
        serve_file(yaml.safe_load(shown.text(target)))
        return
    module, _, name = target.partition(":")
    assert hasattr(importlib.import_module(module), name), target
    load_config(dict(word.split("=", 1) for word in params["arguments"]))


def _pre_commit(words: Sequence[str], shown: Shown) -> None:
    assert (ROOT / ".pre-commit-config.yaml").is_file()
    assert words[0] == "install", words


CHECKS: dict[str, Callable[[Sequence[str], Shown], None]] = {
    "make": _make,
    "pip": _pip,
    "export": _export,
    "ray": _ray,
    "serve": _serve,
    "kubectl": kubectl,
    "helm": helm,
    "docker": docker,
    "pre-commit": _pre_commit,
}
