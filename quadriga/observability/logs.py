"""Logs of every process, as text or as a JSON object a line.

`configure_logging` is called once, first thing in a process. Records may carry fields beside their
message (`extra={"request_id": …}`): with JSON they are keys of their own. Prompts and completions
are never logged, at any level: a log line has a request's id, sizes, times and codes.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from copy import copy
from typing import Any, Literal, TextIO

Format = Literal["text", "json"]

OURS = ("quadriga", "actors", "serve_app")
MAX_MESSAGE = 4000
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, process, message, and the record's own fields.

    Args:
        process: The actor's or ingress's name.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage()[:MAX_MESSAGE],
        }
        line |= {k: _plain(v) for k, v in _fields(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, allow_nan=False)


class TextFormatter(logging.Formatter):
    """The time, the level, the message, and the record's own fields behind it.

    Control characters are written out, and the lines of an exception begin with a bar: whatever
    gets into a message from outside, it makes no line that looks like another record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        own = copy(record)
        own.exc_text = None  # as another formatter wrote it
        return super().format(own)

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{k}={_plain(v)}" for k, v in _fields(record)]
        return _visible(" ".join([super().formatMessage(record), *fields]))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"| {_visible(line)}" for line in super().formatException(ei).split("\n"))


class _OurHandler(logging.StreamHandler[TextIO]):
    """The handler installed here, known by its type when it is to be replaced."""


def configure_logging(
    kind: Format, level: str, *, process: str, stream: TextIO | None = None
) -> None:
    """Send this process's records to standard error; a second call replaces the first.

    Args:
        level: Of our own loggers; others say what is at least a warning.
        process: The actor's or ingress's name.
        stream: Instead of standard error.
    """
    handler = _OurHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if kind == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _OurHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


def is_configured() -> bool:
    """Whether `configure_logging` was called in this process."""
    return any(isinstance(handler, _OurHandler) for handler in logging.getLogger().handlers)


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _fields(record: logging.LogRecord) -> list[tuple[str, Any]]:
    """Those that the caller gave; Ray adds private ones to every record of a process."""
    return [(k, v) for k, v in vars(record).items() if k not in _STANDARD and k[0] != "_"]


def _plain(value: object) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int | bool | None) else str(value)[:MAX_MESSAGE]


def _rfc3339(unix_s: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{whole}.{int(unix_s % 1 * 1000):03d}Z"
