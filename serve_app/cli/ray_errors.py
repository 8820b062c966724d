"""Ray that does not start or cannot be reached, in one line instead of a traceback."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from quadriga.errors import Unavailable

LOCAL_REMEDY = (
    "free CPU, memory and disk (a Ray cluster that was left behind ends with `ray stop`), "
    "then try again"
)
CLUSTER_REMEDY = (
    "check the address (--address or RAY_ADDRESS) and that `ray status` answers there, or leave "
    "it out to start Ray on this machine"
)
MAX_REASON_CHARS = 300
CONNECT_PATIENCE_S = 10.0
CONNECT_PAUSE_S = 0.5


def explain(what: str, exc: BaseException, *, waited_s: float, remedy: str) -> Unavailable:
    """Return an error with what was tried, for how long, why it failed and what to do."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    # A failure that Ray carried over from another process ends with the error itself.
    reason = lines[-1] if "Traceback" in str(exc) else (lines or [type(exc).__name__])[0]
    return Unavailable(
        f"{what} failed after {waited_s:.0f} s: {reason[:MAX_REASON_CHARS].rstrip('. ')}; {remedy}"
    )


def explain_in_serve_cli() -> None:
    """In `serve run`, print one line where `ray.init` fails; does nothing in other processes.

    That command builds the application first and connects then, where only the hook for uncaught
    exceptions is ours. The exit status is 1. As Ray tries for minutes at a closed port, the address
    is tried here before.

    Raises: SystemExit: The port at the cluster's address is closed.
    """
    if Path(sys.argv[0]).name != "serve":
        return
    began_s = time.monotonic()
    address = _option("--address", "-a") or os.environ.get("RAY_ADDRESS")
    if address is not None and (failure := _unreachable(address)) is not None:
        waited_s = time.monotonic() - began_s
        what = f"connecting to Ray at {address}"
        error = explain(what, failure, waited_s=waited_s, remedy=CLUSTER_REMEDY)
        sys.exit(f"quadriga: {error.message}")
    earlier = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, Exception) or not _is_from_ray_init(trace):
            earlier(kind, exc, trace)
            return
        what = f"connecting to Ray at {address}" if address else "starting Ray on this machine"
        waited_s = time.monotonic() - began_s
        remedy = CLUSTER_REMEDY if address else LOCAL_REMEDY
        line = explain(what, exc, waited_s=waited_s, remedy=remedy).message
        print(f"quadriga: {line}", file=sys.stderr)

    sys.excepthook = hook


def _unreachable(address: str) -> OSError | None:
    """Why `host:port` cannot be reached; None where it can, or for other forms."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return None
    give_up_s = time.monotonic() + CONNECT_PATIENCE_S
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_PATIENCE_S):
                return None
        except (OSError, OverflowError) as exc:
            if time.monotonic() > give_up_s:
                return exc if isinstance(exc, OSError) else OSError(str(exc))
            time.sleep(CONNECT_PAUSE_S)


def _is_from_ray_init(trace: TracebackType | None) -> bool:
    return any(
        frame.f_code.co_name == "init" and frame.f_globals.get("__name__") == "ray._private.worker"
        for frame, _ in traceback.walk_tb(trace)
    )


def _option(*names: str) -> str | None:
    """The value of a command line option of `serve run`."""
    words = sys.argv[1:]
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else (words[i + 1] if i + 1 < len(words) else None)
    return None
