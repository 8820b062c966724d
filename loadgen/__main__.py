"""`python -m loadgen COMMAND`: every command is a module with `add_arguments` and `run`.

A module is imported only when its command is asked for, so that `run` stays a light client.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

from quadriga.errors import QuadrigaError
from quadriga.files import FULL_DISK

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_UNREAD = 128 + signal.SIGPIPE


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table: where a command lives."""

    module: str
    help: str

    @property
    def is_shipped(self) -> bool:
        """Whether the installed package has it; the others are run from a checkout."""
        return not self.module.startswith(FROM_CHECKOUT)


class CommandModule(Protocol):
    """What a command's module has; `run` returns the exit status."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


_BENCH, _PAPER, _TESTS = "loadgen.bench", "loadgen.paper", "tests.reliability"
FROM_CHECKOUT = (_BENCH, _PAPER, _TESTS)
"""Packages that the wheel leaves out (`tool.hatch` in pyproject.toml)."""

COMMANDS: dict[tuple[str, ...], Command] = {
    tuple(name.split()): Command(module, text)
    for name, module, text in (
        ("run", "loadgen.run", "send a trace, prompts, tasks or conversations, and check"),
        ("ramp", "loadgen.ramp", "raise the load until the SLO breaks"),
        ("compare", "loadgen.comparison.command", "two runs: what differs, and what is noise"),
        ("watch", "loadgen.watch", "replicas, forecasts and moves of a service, live"),
        ("why", "loadgen.why", "why a request's sequences were moved"),
        ("replay", "loadgen.replay", "decide recorded moves again, under other settings"),
        ("plan", "loadgen.plan", "memory and largest batch of a model at each depth"),
        ("profile", "loadgen.profile", "measure models at each depth for a catalogue"),
        ("simulate", "loadgen.simulate", "a trace on a simulated cluster, same policies"),
        ("chaos", f"{_TESTS}.chaos.command", "kill and stop processes under load, and judge"),
        ("soak", f"{_TESTS}.soak", "an hour of random load and faults; nothing may leak"),
        ("overload", f"{_TESTS}.overload", "five times the capacity, and recovery"),
        ("upgrade", f"{_TESTS}.upgrade", "deployments, SIGTERM and drains under load"),
        ("bench engine", f"{_BENCH}.engines.command", "offline generation speed, against peers"),
        ("bench serve", f"{_BENCH}.cluster.serve", "the service's speed over the engine's"),
        (
            "bench rescheduling",
            f"{_BENCH}.cluster.rescheduling",
            "a real cluster with and without rescheduling",
        ),
        (
            "bench rescheduling-turns",
            f"{_TESTS}.rescheduling_turns",
            "one service with and without rescheduling, in turns",
        ),
        (
            "bench simulator",
            f"{_BENCH}.cluster.simulator",
            "the simulator against the cluster it simulates",
        ),
        (
            "bench migration",
            f"{_BENCH}.cluster.migration",
            "the gap that a live migration makes in streams",
        ),
        ("bench scheduler", f"{_BENCH}.scheduler", "time of a rescheduling decision"),
        (
            "bench depth-forecast",
            f"{_BENCH}.depth_forecast",
            "layers and work that were forecast, against what came",
        ),
        (
            "bench depth-pools",
            f"{_BENCH}.depth_pools",
            "shallow and deep sequences in one batch, and each alone",
        ),
        ("bench profile", f"{_BENCH}.profile", "a cost profile for the simulator"),
        ("bench grammar", f"{_BENCH}.grammar", "answers of a given form: validity and cost"),
        ("bench adapters", f"{_BENCH}.adapters", "LoRA adapters: what one adds to a step"),
        (
            "bench transports",
            f"{_BENCH}.transports",
            "KV from process to process: speed, and processor time",
        ),
        ("bench prefix", f"{_BENCH}.prefix", "prompts that begin alike: time saved, and overhead"),
        ("paper ares", f"{_PAPER}.ares.experiment", "rescheduling against its baselines"),
        (
            "paper ares-predictor",
            f"{_PAPER}.ares.predictor",
            "length heads against other predictors",
        ),
        ("paper drex", f"{_PAPER}.drex.experiment", "rebatching against grouped and no exits"),
        (
            "paper lossless",
            f"{_PAPER}.lossless.experiment",
            "exits that draft, against full depth, token for token",
        ),
        ("paper baton", f"{_PAPER}.baton.experiment", "relay batch against other batches"),
        (
            "paper helios",
            f"{_PAPER}.helios.experiment",
            "model and depth chosen, against one whole",
        ),
    )
}


class _CommandHelp(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that there are, what a value is, and examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is None or action.default is False or action.default == []
        if has_none or "default" in (action.help or ""):
            return action.help
        if isinstance(action.default, list):
            words = " ".join(map(str, action.default)).replace("%", "%%")
            return f"{action.help} (default: {words})"
        return super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.dest.endswith("_s"):
            return "SECONDS"
        return _METAVARS.get(getattr(action.type, "__name__", ""), action.dest.upper())


# What stands for a value in a help, by the name of its type.
_METAVARS = {
    "Path": "PATH",
    "file_to_write": "FILE",
    "folder_to_write": "DIR",
    "whole_number": "N",
    "real_number": "X",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, without the whole usage around it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Where the output is not read to its end, as in `| head`, the command ends without a word.
    """
    try:
        status = _main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        return EXIT_UNREAD
    return status


def _is_unread() -> bool:
    """Whether standard output is what broke; if so, what is left to write goes nowhere."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # no file
        return False
    look = select.poll()
    look.register(output, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def _main(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return EXIT_OK if words else EXIT_USAGE
    name = find_command(words)
    if name is None and words[1:2] in (["-h"], ["--help"]) and in_group(words[0]):
        print("\n".join(rows(words[0])))
        return EXIT_OK
    if name is None:
        print(unknown(words), file=sys.stderr)
        return EXIT_USAGE
    module = _module(name)
    if module is None:
        print(
            f"error: {' '.join(name)!r} is not part of the installed package; "
            f"run `python -m loadgen {' '.join(name)}` in a checkout of the repository",
            file=sys.stderr,
        )
        return EXIT_USAGE
    parser = _Parser(
        prog=f"python -m loadgen {' '.join(name)}",
        description=COMMANDS[name].help,
        formatter_class=_CommandHelp,
    )
    module.add_arguments(parser)
    args = parser.parse_args(words[len(name) :])
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    try:
        return module.run(args)
    except QuadrigaError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as exc:
        if exc.errno not in FULL_DISK:
            raise
        print(f"error: {exc}; make room on the disk, and start it again", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


def _module(name: tuple[str, ...]) -> CommandModule | None:
    """Import a command's module; None where it is left out of the installed package."""
    command = COMMANDS[name]
    package = command.module.rpartition(".")[0]
    try:
        is_there = command.is_shipped or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is absent
        is_there = False
    if not is_there:
        return None
    return cast(CommandModule, importlib.import_module(command.module))


def _terminated(number: int, frame: object) -> None:
    """Leave as by Ctrl-C: services that were started here are stopped on the way out."""
    raise SystemExit(EXIT_TERMINATED)


def find_command(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the registered command that `words` begin with, the longest one first."""
    for length in (2, 1):
        name = tuple(words[:length])
        if len(name) == length and name in COMMANDS:
            return name
    return None


def in_group(group: str | None) -> list[tuple[str, ...]]:
    """Return the commands of a group (`bench`, `paper`); None: those in no group."""
    return [name for name in COMMANDS if (name[0] if len(name) > 1 else None) == group]


def rows(group: str | None, *, is_shipped: bool | None = None) -> list[str]:
    """Return a line for every command of a group.

    Args:
        is_shipped: Only those that the installed package has, or only the others.
    """
    width = max(len(" ".join(name)) for name in COMMANDS)
    return [
        f"  {' '.join(name):{width}}  {COMMANDS[name].help}"
        for name in in_group(group)
        if is_shipped in (None, COMMANDS[name].is_shipped)
    ]


def usage() -> str:
    """Return the list of commands, in groups."""
    return "\n".join(
        [
            "usage: python -m loadgen COMMAND [options]   (COMMAND --help lists them)",
            "",
            "first: python -m loadgen run   (a service runs at http://127.0.0.1:8000)",
            "",
            "commands:",
            *rows(None, is_shipped=True),
            "",
            "faults and load on a service of their own (in a checkout):",
            *rows(None, is_shipped=False),
            "",
            "benchmarks (in a checkout):",
            *rows("bench"),
            "",
            "the papers (in a checkout):",
            *rows("paper"),
        ]
    )


def unknown(words: Sequence[str]) -> str:
    """Return what to say to a command that does not exist."""
    given = " ".join(word for word in words[:2] if not word.startswith("-"))
    if given == words[0] and in_group(given):
        return "\n".join([f"error: {given!r} alone is no command; there are", *rows(given)])
    names = [" ".join(name) for name in COMMANDS]
    close = difflib.get_close_matches(given, names, n=1) or difflib.get_close_matches(
        words[0], names, n=1
    )
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"error: unknown command {given or words[0]!r}{hint}\n\n{usage()}"


if __name__ == "__main__":
    sys.exit(main())
