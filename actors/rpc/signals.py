"""SIGTERM to an actor's process.

Ray's workers take it as a request to end once every call has returned. Ours have calls that never
return, so they would stay, and answer no other call: to everyone else they would hang.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from ray._private import worker


def on_sigterm(callback: Callable[[], None]) -> None:
    """Have SIGTERM call `callback` on the running event loop, and do nothing else.

    Ray handles the signal on its workers' main thread, the only one that Python lets install a
    handler, and an asyncio actor never runs there. So Ray's handler stays, and what it calls to end
    the process is replaced.
    """
    module: Any = worker
    put = asyncio.get_running_loop().call_soon_threadsafe
    module.raise_sys_exit_with_custom_error_message = lambda *_, **__: put(callback)


def ignore_sigterm() -> None:
    """Have SIGTERM do nothing: for actors that another one ends."""
    module: Any = worker
    module.raise_sys_exit_with_custom_error_message = lambda *_, **__: None


def die_on_sigterm() -> None:
    """Have SIGTERM end the process at once: for actors that Ray then starts anew."""
    on_sigterm(lambda: os.kill(os.getpid(), signal.SIGKILL))
