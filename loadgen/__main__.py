"""`python -m loadgen COMMAND`: every command is a module with `add_arguments` and `run`.

A module is imported only when its command is asked for, so that `run` stays a light client.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

from quadriga.errors import QuadrigaError

EXIT_OK = 0
EXIT_FAILED = 1  # the checker or a comparison failed
EXIT_USAGE = 2
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_UNREAD = 128 + signal.SIGPIPE


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table: where a command lives."""

    module: str
    help: str


class CommandModule(Protocol):
    """What a command's module has; `run` returns the exit status."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: dict[tuple[str, ...], Command] = {
    ("run",): Command("loadgen.run", "send a trace, prompts, tasks or conversations, and check"),
    ("ramp",): Command("loadgen.ramp", "raise the load until the SLO breaks"),
    ("compare",): Command("loadgen.compare", "two runs: what differs, and what is noise"),
    ("bench", "engine"): Command("loadgen.bench.engine", "offline generation speed, against peers"),
    ("bench", "serve"): Command("loadgen.bench.serve", "the service's speed over the engine's"),
    ("watch",): Command("loadgen.watch", "replicas, forecasts and moves of a service, live"),
    ("bench", "rescheduling"): Command(
        "loadgen.bench.rescheduling", "a real cluster with and without rescheduling"
    ),
    ("bench", "simulator"): Command(
        "loadgen.bench.simulator", "the simulator against the cluster it simulates"
    ),
    ("paper", "drex"): Command("loadgen.paper.drex", "rebatching against grouped and no exits"),
    ("paper", "baton"): Command("loadgen.paper.baton", "relay batch against other batches"),
    ("bench", "scheduler"): Command("loadgen.bench.scheduler", "time of a rescheduling decision"),
    ("bench", "migration"): Command(
        "loadgen.bench.migration", "what a live migration is felt like, in steps"
    ),
    ("bench", "depth"): Command("loadgen.bench.depth", "memory, speed and changes of depth"),
    ("bench", "profile"): Command("loadgen.bench.profile", "a cost profile for the simulator"),
    ("plan",): Command("loadgen.plan", "memory and largest batch of a model at each depth"),
    ("profile",): Command("loadgen.profile", "measure models at each depth for a catalogue"),
    ("simulate",): Command("loadgen.simulate", "a trace on a simulated cluster, same policies"),
    ("paper", "ares-predictor"): Command(
        "loadgen.paper.ares_predictor", "length heads against other predictors"
    ),
    ("paper", "ares"): Command("loadgen.paper.ares", "rescheduling against its baselines"),
    ("paper", "helios"): Command(
        "loadgen.paper.helios", "model and depth chosen, against one whole"
    ),
    ("chaos",): Command("loadgen.chaos.command", "kill and stop processes under load, and judge"),
    ("soak",): Command("loadgen.robust.soak", "an hour of random load and harm; nothing may leak"),
    ("overload",): Command("loadgen.robust.overload", "five times the capacity, and recovery"),
    ("upgrade",): Command("loadgen.robust.upgrade", "deployments, SIGTERM and drains under load"),
    ("bench", "generator"): Command("loadgen.bench.generator", "the load generator's own limit"),
}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
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

    Where nobody reads the output to its end, as in `| head`, the command ends without a word.
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
    module = cast(CommandModule, importlib.import_module(COMMANDS[name].module))
    parser = _Parser(
        prog=f"python -m loadgen {' '.join(name)}",
        description=COMMANDS[name].help,
        formatter_class=_HelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(words[len(name) :])
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    try:
        return module.run(args)
    except QuadrigaError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


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


def rows(group: str | None) -> list[str]:
    """Return a line for every command of a group."""
    width = max(len(" ".join(name)) for name in COMMANDS)
    return [f"  {' '.join(name):{width}}  {COMMANDS[name].help}" for name in in_group(group)]


def usage() -> str:
    """Return the list of commands, in groups."""
    return "\n".join(
        [
            "usage: python -m loadgen COMMAND [options]   (COMMAND --help lists them)",
            "",
            "first: python -m loadgen run   (a service runs at http://127.0.0.1:8000)",
            "",
            "commands:",
            *rows(None),
            "",
            "benchmarks:",
            *rows("bench"),
            "",
            "the papers:",
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
    return f"error: unknown command {given!r}{hint}\n\n{usage()}"


if __name__ == "__main__":
    sys.exit(main())
