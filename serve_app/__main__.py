"""`python -m serve_app [key=value …]`: the service on this machine until Ctrl-C.

`python -m serve_app keys` makes API keys; see `serve_app.auth.key_command`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from quadriga import __version__
from quadriga.config.loader import QuadrigaConfig, load_config, setting_names
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.ports import LOOPBACK, is_free, with_port
from serve_app.auth.api_keys import KEY_VARIABLE, ApiKeys
from serve_app.auth.keys import make_key
from serve_app.cli.arguments import ServeParser, port_number
from serve_app.cli.environment import Proxy, choose_proxy, prepare_environment
from serve_app.cli.launch import Addresses
from serve_app.cli.local_run import RunningService, leave, run_local
from serve_app.cli.startup import describe
from serve_app.http import tls
from serve_app.http.tls import Tls, is_loopback, port_variable

KEY_FILE = "api_key"
DEFAULT_ADMIN_PORT = 8001
ADMIN_PORT_VARIABLE = "QUADRIGA_ADMIN_PORT"
_EXAMPLES = """examples:
  python -m serve_app
  python -m serve_app model=/models/Llama-3.2-1B decode_replicas=3 engine.threads=4
  python -m serve_app --config service.yaml --http-port 8080

environment: QUADRIGA_HOST, QUADRIGA_HTTP_PORT, QUADRIGA_GRPC_PORT, QUADRIGA_TLS_CERT and others for
TLS, and QUADRIGA_ADMIN_PORT (metrics and live page; 8001, 0: none) change the defaults;
QUADRIGA_API_KEY is a key for clients."""


def main(argv: list[str] | None = None) -> int:
    """Parse, start, wait, stop. Returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["keys"]:
        from serve_app.auth.key_command import key_command

        return key_command(given[1:])
    try:
        options = _parser().parse_with_settings(given, setting_names())
        addresses = _addresses(options)
        addresses.to_environment()
        choose_proxy(options.proxy, has_grpc=not options.no_grpc)
        addresses.check()
        prepare_environment()
        arguments, note = _with_admin_port(
            _arguments(options.config, options.settings),
            {options.http_port, options.grpc_port, options.https_port, options.grpc_tls_port},
        )
        config = load_config(arguments)
        keys = ApiKeys.load(config.auth)
        if not keys.digests and not is_loopback(options.host):
            raise ConfigError(
                f"--host: {options.host} is not loopback, so API keys are needed: set "
                f"{KEY_VARIABLE} or auth.api_keys_file",
                param="host",
            )
        hint = f"# KEY: yours ({KEY_VARIABLE} or auth)"
        if not keys.digests and not options.no_grpc:
            key, path = _own_key()
            keys = ApiKeys.of([key], is_http_open=True)
            hint = f'KEY = open("{path}").read().strip()'
        return _serve(config, keys, addresses, hint, note)
    except QuadrigaError as exc:
        print(f"quadriga: {exc.message}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1


def _serve(
    config: QuadrigaConfig, keys: ApiKeys, addresses: Addresses, key_hint: str, admin_note: str
) -> int:
    """Serve until a signal comes; only our own lines reach the terminal.

    Raises: ConfigError, Unavailable: It cannot be started, or Ray ended.
    """

    def work(running: RunningService) -> int:
        text = describe(
            running.service.status(),
            http_url=addresses.http_url,
            needs_key=not keys.is_http_open,
            grpc_address=addresses.grpc_target,
            key_hint=key_hint,
        )
        text += admin_note or _admin_line(config)
        logs = f"Logs are in {running.output.path.parent}"
        running.console.say(f"{text}\n{logs}\nCtrl-C stops everything.")
        running.wait()

    print(f"starting {', '.join(pool.model for pool in config.pools)} …", flush=True)
    return run_local(config, keys, addresses, work)


def _parser() -> ServeParser:
    parser = ServeParser(
        prog="python -m serve_app",
        usage="%(prog)s [options] [key=value ...]\n       %(prog)s keys --help",
        description="Serve on this machine until Ctrl-C. `keys` makes API keys.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"quadriga {__version__}")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="settings, as in decode_replicas=3; docs/configuration.md has all of them",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings in YAML; key=value wins over it"
    )
    host = os.environ.get("QUADRIGA_HOST") or LOOPBACK
    parser.add_argument(
        "--host", default=host, help="address to listen at; off loopback it needs API keys"
    )
    http_port = port_variable(tls.PLAIN_HTTP_PORT_VARIABLE, 8000)
    _add_port(parser, http_port, "OpenAI's API, /health, /docs", "--http-port", "--port")
    grpc_port = port_variable(tls.PLAIN_GRPC_PORT_VARIABLE, 9000)
    _add_port(
        parser, grpc_port, "gRPC; Serve's own proxy opens it on every interface", "--grpc-port"
    )
    parser.add_argument("--no-grpc", action="store_true", help="HTTP only")
    parser.add_argument(
        "--proxy",
        choices=get_args(Proxy),
        default="auto",
        help="in front of HTTP and gRPC; auto: HAProxy where it is installed, else Ray Serve's own",
    )
    group = parser.add_argument_group("TLS", "certificate and key in PEM; then only TLS is spoken")
    for option, variable, what in (
        ("--tls-cert", tls.CERT_VARIABLE, "certificate with its chain"),
        ("--tls-key", tls.KEY_VARIABLE, "its key"),
        ("--tls-client-ca", tls.CLIENT_CA_VARIABLE, "ask clients for a certificate of this CA"),
    ):
        file = os.environ.get(variable) or None
        group.add_argument(option, type=Path, default=file, metavar="FILE", help=what)
    https_port = port_variable(tls.HTTPS_PORT_VARIABLE, tls.DEFAULT_HTTPS_PORT)
    _add_port(group, https_port, "HTTPS", "--https-port")
    tls_port = port_variable(tls.GRPC_PORT_VARIABLE, tls.DEFAULT_GRPC_PORT)
    _add_port(group, tls_port, "gRPC over TLS", "--grpc-tls-port")
    return parser


def _add_port(group: argparse._ActionsContainer, default: int, what: str, *options: str) -> None:
    group.add_argument(*options, type=port_number, default=default, metavar="PORT", help=what)


def _addresses(options: argparse.Namespace) -> Addresses:
    """Raises: ConfigError when the TLS options do not go together."""
    secured = None
    if options.tls_cert is not None and options.tls_key is not None:
        secured = Tls(
            options.tls_cert.absolute(),
            options.tls_key.absolute(),
            options.tls_client_ca and options.tls_client_ca.absolute(),
            options.https_port,
            options.grpc_tls_port,
            "" if options.host == "0.0.0.0" else options.host,
        )
    elif options.tls_cert or options.tls_key or options.tls_client_ca:
        raise ConfigError(
            "--tls-cert and --tls-key are both needed for TLS, or "
            f"{tls.CERT_VARIABLE} and {tls.KEY_VARIABLE}",
            param="tls-cert",
        )
    return Addresses(
        options.host,
        options.http_port,
        None if options.no_grpc else options.grpc_port,
        secured,
    )


def _with_admin_port(
    arguments: dict[str, Any], others: Collection[int] = ()
) -> tuple[dict[str, Any], str]:
    """The settings with the admin port on, unless they say otherwise or it is taken.

    Args:
        others: Ports of the clients.

    Returns:
        The settings, and the banner's line about a port that is taken.
    """
    named = isinstance(arguments.get("admin"), dict) and "port" in arguments["admin"]
    if named or "admin.port" in arguments:
        return arguments, ""
    if os.environ.get(ADMIN_PORT_VARIABLE):
        port = port_variable(ADMIN_PORT_VARIABLE, 0, least=0)
        return arguments | {"admin.port": port or None}, ""
    if DEFAULT_ADMIN_PORT not in others and is_free(DEFAULT_ADMIN_PORT):
        return arguments | {"admin.port": DEFAULT_ADMIN_PORT}, ""
    return arguments | {"admin.port": None}, (
        f"\n  no live page and metrics: port {DEFAULT_ADMIN_PORT} is taken by "
        f"{'clients' if DEFAULT_ADMIN_PORT in others else 'another process'}; "
        "admin.port=PORT chooses another\n"
    )


def _admin_line(config: QuadrigaConfig) -> str:
    """The banner's line about the admin port; empty where it is off."""
    if config.admin.port is None:
        return ""
    url = f"http://{with_port(config.admin.host, config.admin.port)}"
    return f"\n  live {url}/dashboard, metrics {url}/metrics\n"


def _arguments(file: Path | None, settings: list[str]) -> dict[str, Any]:
    """Settings from the file and the command line.

    Raises: ConfigError when the file is unusable or a setting is no `key=value`.
    """
    arguments: dict[str, Any] = {}
    if file is not None:
        import yaml

        try:
            tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as exc:
            raise ConfigError(f"--config: {file} cannot be read: {exc}", param="config") from exc
        if not isinstance(tree, dict) or "applications" in tree:
            raise ConfigError(
                f"--config: {file} must hold a mapping of settings; a file of Ray Serve's goes to "
                "`serve run`, and its settings are what stands under args",
                param="config",
            )
        arguments = tree
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"{setting!r}: settings have the form key=value", param=setting)
        arguments = arguments | {key: value}
    return arguments


def _own_key() -> tuple[str, Path]:
    """The key this machine made for itself, made now if there is none; its file is private."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "quadriga" / KEY_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.is_file() and (key := path.read_text(encoding="utf-8").strip()):
            return key, path
        key = make_key()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(key + "\n")
    except OSError as exc:
        raise ConfigError(
            f"{path.parent} cannot hold the key that is made for you ({exc}); set XDG_STATE_HOME "
            f"to a folder that can be written, or {KEY_VARIABLE} to a key"
        ) from exc
    return key, path


if __name__ == "__main__":
    leave(main())
