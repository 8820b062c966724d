"""How the commands of this package take their arguments, and say what is wrong with them."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

MAX_PORT = 65_535


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that there are, and examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class ServeParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage around it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quadriga: {message}; see {self.prog} --help\n")


def port_number(text: str) -> int:
    """An argparse type: a TCP port."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is no port (1 to {MAX_PORT})")
    return int(text)
