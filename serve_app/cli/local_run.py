"""A command that runs a service on this machine: its terminal, its signals, its end."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from quadriga.config.loader import QuadrigaConfig
from quadriga.errors import Unavailable
from serve_app.auth.api_keys import ApiKeys
from serve_app.cli.console import Console
from serve_app.cli.launch import Addresses, LocalService, find_models
from serve_app.cli.signals import StopSignals
from serve_app.cli.stdio_redirect import StdioRedirect

LOOK_INTERVAL_S = 0.2
SIGNAL_PATIENCE_S = 1.0
"""A signal to all processes of a service may end Ray before it is handled here."""


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that is ready.

    Attributes:
        output: Its `terminal` is the command's own; standard output goes to a log file.
    """

    service: LocalService
    console: Console
    output: StdioRedirect

    def wait(self) -> NoReturn:
        """Wait for a signal. Raises: KeyboardInterrupt; Unavailable when Ray ended by itself."""
        while not (lost := self.service.lost_process()):
            time.sleep(LOOK_INTERVAL_S)
        time.sleep(SIGNAL_PATIENCE_S)
        raise Unavailable(f"Ray's {lost} ended, and the service with it")


def run_local(
    config: QuadrigaConfig,
    keys: ApiKeys,
    addresses: Addresses,
    work: Callable[[RunningService], int],
    *,
    interrupted_status: int = 0,
) -> int:
    """Start a service, do `work` with it, and end it.

    The first SIGINT, SIGTERM or SIGHUP interrupts the start or the work, and open requests may
    end; a further one ends them, and the service, at once.

    Args:
        work: Returns the exit status.
        interrupted_status: The exit status after one signal.

    Returns:
        The exit status: 128 + the signal's number where a further signal ended the service.

    Raises:
        ConfigError, Unavailable: It cannot be started, or Ray ended.
    """
    with StopSignals() as signals:
        try:
            config = find_models(config)  # a conversion shows its progress, before `StdioRedirect`
            with StdioRedirect() as output:
                console = Console(output.terminal)
                service = LocalService(config, keys, addresses, progress=console.progress)
                running = RunningService(service, console, output)
                status = _run(running, work, signals, interrupted_status)
                console.say("stopped" if signals.num_requests < 2 else "stopped at once")
        except KeyboardInterrupt:  # before there was anything to end
            status = interrupted_status
    return signals.exit_status if signals.num_requests > 1 else status


def _run(
    running: RunningService,
    work: Callable[[RunningService], int],
    signals: StopSignals,
    interrupted_status: int,
) -> int:
    service, output = running.service, running.output
    try:
        service.start()
        output.move_to(service.log_folder())
        return work(running)
    except KeyboardInterrupt:
        return interrupted_status
    except Unavailable as exc:
        raise Unavailable(f"{exc.message} (log: {output.path})") from exc
    finally:
        signals.interrupts = False
        service.stop(running.console.report, lambda: signals.num_requests > 1)


def leave(status: int) -> NoReturn:
    """End this process at once: exit handlers of Ray's would wait for a Ray that is gone."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(status)
