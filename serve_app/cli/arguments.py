"""The argument parser of this package's commands."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from quadriga.ports import MAX_PORT


class ServeHelpFormatter(
    argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """Shows the defaults that there are, and examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ([], ""):
            return action.help
        return super()._get_help_string(action)


class ServeParser(argparse.ArgumentParser):
    """Reports an error in one line, without the whole usage around it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=ServeHelpFormatter, **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quadriga: {message}; see {self.prog} --help\n")

    def parse_with_settings(
        self, argv: Sequence[str], settings: Iterable[str]
    ) -> argparse.Namespace:
        """Parse options and `key=value` settings in any order.

        Args:
            settings: All keys that there are; an unknown option is compared with them.
        """
        options, unknown = self.parse_known_intermixed_args(argv)
        for word in unknown:
            if word.startswith("-"):
                self.error(self._unknown(word, settings))
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def _unknown(self, word: str, settings: Iterable[str]) -> str:
        """What is wrong with an option that there is not, and what may have been meant."""
        given, _, value = word.partition("=")
        name = given.lstrip("-").replace("-", "_")
        value = value or "VALUE"
        keys = {key: f"{key}={value}" for key in settings}
        named = [keys[key] for key in keys if name in (key, key.rpartition(".")[2])]
        if named:
            return f"there is no option {given}; settings are written {' or '.join(named)}"
        known = {
            option.lstrip("-").replace("-", "_"): option for option in self._option_string_actions
        }
        known |= {key.rpartition(".")[2]: text for key, text in keys.items()}
        near = difflib.get_close_matches(name, known, n=2)
        hint = f"; did you mean {' or '.join(known[key] for key in near)}?" if near else ""
        return f"there is no option {given}{hint}"


def port_number(text: str) -> int:
    """An argparse type: a TCP port."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is no port (1 to {MAX_PORT})")
    return int(text)
