"""A Ray cluster of several nodes on one machine, each node in a network namespace of its own.

`sudo .venv/bin/python -m deploy.multinode [key=value …]` starts a head, a node for the prefill
replica and one for each decode replica, joined by a bridge and veth pairs, and serves the bundled
model on them until Ctrl-C. Replicas are placed by the nodes' Ray labels, KV crosses the bridge, and
the service answers this machine at the head's address.

Everything runs in its own PID, mount and network namespaces, so all of it ends with this process.
It needs Linux, root, and the commands `ip`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from deploy.multinode_inside import (
    AGENT_TIMEOUT_MS,
    BRIDGE,
    COMMAND_TIMEOUT_S,
    GCS_PORT,
    GRPC_PORT,
    HTTP_PORT,
    ON_A_NODE,
    POLL_INTERVAL_S,
    RAY_FOLDER,
    START_TIMEOUT_S,
    nodes,
    run_command,
    serve_config,
)
from quadriga.pipes import read_line
from quadriga.ports import RAY_ON_LOOPBACK

COMMANDS = ("ip", "unshare", "nsenter")
SUBNET = "10.213.{third}"
HOST_ADDRESS, BRIDGE_ADDRESS = 254, 253
UPLINK = "uplink"
UNSHARE = (
    "--net",
    "--mount",
    "--propagation=private",
    "--pid",
    "--fork",
    "--kill-child=SIGKILL",
    "--mount-proc",
)


def why_not_here() -> str | None:
    """Why network namespaces cannot be made here; None where they can."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return f"these commands are missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        run_command("unshare", *UNSHARE, "ip", "link", "add", "probe", "type", "bridge")
        run_command(
            "ip", "link", "add", "qd-probe", "type", "veth", "peer", "name", "qd-probe-peer"
        )
    except RuntimeError as exc:
        return str(exc)
    run_command("ip", "link", "del", "qd-probe")
    return None


class MultiNode:
    """The cluster and the service on it; a context manager.

    Args:
        config: Further configuration of the service.
        environment: Further variables of all its processes.
        disk_bytes: Size of a disk of its own for each node's files, logs included; 0: none has one.
        log: Called with a line for each step of the start.
    """

    def __init__(
        self,
        *,
        num_prefill: int = 1,
        num_decode: int = 2,
        config: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        disk_bytes: int = 0,
        log: Any = lambda line: None,
    ) -> None:
        self._subnet = SUBNET.format(third=1 + os.getpid() % 250)
        self.nodes = nodes(self._subnet, num_prefill=num_prefill, num_decode=num_decode)
        self.api_key = secrets.token_urlsafe(24)
        self.url = f"http://{self.nodes[0].address}:{HTTP_PORT}"
        self.grpc = f"{self.nodes[0].address}:{GRPC_PORT}"
        self.gcs_address = f"{self.nodes[0].address}:{GCS_PORT}"
        self.environment = self._variables() | dict(environment or {})
        self._config = serve_config(self.nodes, config or {})
        self.disk_bytes = disk_bytes
        self._log = log
        self._uplink = f"qd{os.getpid()}"
        self._folder: Path | None = None
        self._outer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MultiNode:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything, and wait until it is gone."""
        if self._outer is not None:
            self._outer.kill()  # and the kernel all that is in its PID namespace
            self._outer.wait()
            for pipe in (self._outer.stdin, self._outer.stdout):
                if pipe is not None:
                    pipe.close()
            self._outer = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def status(self) -> dict[str, Any]:
        """Desired and actual state of the service, each replica with its `node` (or None).

        Raises: RuntimeError: It cannot be had.
        """
        found: dict[str, Any] = json.loads(self._inside("status"))
        if "failure" in found:
            raise RuntimeError(found["failure"])
        names = {node.address: node.name for node in self.nodes}
        for replica in found["replicas"]:
            address = found["addresses"].get(replica["node_id"])
            replica["node"] = names.get(address)
        return found

    @property
    def pid(self) -> int:
        """Of the process that all others descend from."""
        assert self._outer is not None
        return self._outer.pid

    def on_head(self) -> list[str]:
        """What to put before a command to have it run where the head is."""
        head = self.nodes[0].name
        folders = (f"{self._folder}/{head}", f"{self._folder}/{RAY_FOLDER}")
        return [
            *("nsenter", "--target", str(self.inner_pid), "--mount", "--pid", "--net"),
            *("ip", "netns", "exec", head, "sh", "-ec", ON_A_NODE, "sh", *folders),
        ]

    @property
    def inner_pid(self) -> int:
        """Of the first process of the namespaces, as seen from this machine."""
        (inner,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(inner)

    @property
    def folder(self) -> Path:
        """Of all files, as the nodes name it; what is in it is only seen from inside."""
        assert self._folder is not None
        return self._folder

    def start_node(self, node: str) -> None:
        """Start Ray again on a node whose processes have ended. Raises: RuntimeError."""
        said = self._inside(f"start {node}", START_TIMEOUT_S)
        if said != "started":
            raise RuntimeError(f"{node} does not start again: {said}\n{self.logs()}")

    def received_bytes(self, node: str) -> int:
        """Bytes that have come to a node over its veth pair so far."""
        links = json.loads(self.in_bridge("ip", "-json", "-stats", "link", "show", f"to-{node}"))
        return int(links[0]["stats64"]["tx"]["bytes"])  # what the bridge's end has sent

    def logs(self) -> str:
        """The last lines of every process's output."""
        if self._folder is None:
            return ""
        texts = []
        for path in sorted(self._folder.glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            texts.append("\n".join([f"== {path.name}", *lines[-15:]]))
        return "\n".join(texts)

    def _start(self) -> None:
        reason = why_not_here()
        if reason is not None:
            raise RuntimeError(reason)
        # Short: Ray's sockets are in it, and a socket's path has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="qd-", dir="/tmp"))
        plan = {
            "nodes": [asdict(node) for node in self.nodes],
            "folder": str(self._folder),
            "bridge_address": f"{self._subnet}.{BRIDGE_ADDRESS}",
            "disk_bytes": self.disk_bytes,
        }
        (self._folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        (self._folder / "serve.yaml").write_text(yaml.safe_dump(self._config), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "deploy.multinode_inside",
            "run",
            f"{self._folder}/plan.json",
        ]
        self._outer = subprocess.Popen(
            ["unshare", *UNSHARE, *command],
            stdin=subprocess.PIPE,  # its end is the sign to stop
            stdout=subprocess.PIPE,
            env=self.environment,
            start_new_session=True,
        )
        self._await_line("network")
        self._join_bridge()
        self._log(f"{len(self.nodes)} network namespaces are joined by {self._subnet}.0/24")
        self._await_line("ray")
        self._log("Ray runs in all of them")
        self._await_line("serve")
        self._await_health()
        self._log("all replicas are ready")

    def _variables(self) -> dict[str, str]:
        root = str(Path(__file__).resolve().parents[1])
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            # All nodes start at once, on a machine that may be busy.
            "RAY_agent_register_timeout_ms": str(AGENT_TIMEOUT_MS),
            **dict.fromkeys(RAY_ON_LOOPBACK, "1"),  # not what this process's own Ray does
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "QUADRIGA_API_KEY": self.api_key,
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "QUADRIGA_"))}
        return inherited | own

    def _await_line(self, expected: str) -> None:
        """Raises: RuntimeError: It ended or said something else; with the logs."""
        assert self._outer is not None and self._outer.stdout is not None
        try:
            line = read_line(self._outer.stdout, START_TIMEOUT_S)
        except (EOFError, TimeoutError) as exc:
            line = str(exc)
        if line != expected:
            raise RuntimeError(f"{expected}: {line}\n{self.logs()}")

    def _join_bridge(self) -> None:
        """Give this machine's own network an end of the bridge."""
        assert self._outer is not None
        pid = str(self._outer.pid)
        peer = ("peer", "name", UPLINK, "netns", pid)
        run_command("ip", "link", "add", self._uplink, "type", "veth", *peer)
        run_command("ip", "addr", "add", f"{self._subnet}.{HOST_ADDRESS}/24", "dev", self._uplink)
        run_command("ip", "link", "set", self._uplink, "up")
        self.in_bridge("ip", "link", "set", UPLINK, "master", BRIDGE, "up")

    def _await_health(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (self._is_healthy() and self.status()["is_ready"]):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the service is not ready in time\n{self.logs()}")
            time.sleep(POLL_INTERVAL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def in_bridge(self, *command: str) -> str:
        """Run a command where the bridge is."""
        assert self._outer is not None
        return run_command("nsenter", "--target", str(self._outer.pid), "--net", *command)

    def _inside(self, verb: str, timeout_s: float = 2 * COMMAND_TIMEOUT_S) -> str:
        """Have the first process of the namespaces do something, and return what it says.

        Raises: RuntimeError: It ended or did not answer in time; with the logs.
        """
        assert self._outer is not None and self._folder is not None
        assert self._outer.stdin is not None and self._outer.stdout is not None
        self._outer.stdin.write(f"{verb}\n".encode())
        self._outer.stdin.flush()
        try:
            return read_line(self._outer.stdout, timeout_s)
        except (EOFError, TimeoutError) as exc:
            raise RuntimeError(f"{verb}: {exc}\n{self.logs()}") from exc


def main(argv: list[str] | None = None) -> int:
    """Start, say how to ask, and wait for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="e.g. engine.compile=off")
    parser.add_argument("--prefill-nodes", type=int, default=1)
    parser.add_argument("--decode-nodes", type=int, default=2)
    options = parser.parse_args(argv)
    try:
        with MultiNode(
            num_prefill=options.prefill_nodes,
            num_decode=options.decode_nodes,
            config=dict(setting.partition("=")[::2] for setting in options.settings),
            log=print,
        ) as cluster:
            for replica in cluster.status()["replicas"]:
                print(f"  {replica['name']} on {replica['node']}")
            body = '{"model": "quadriga-s", "prompt": "Sort: 3 1 2\\n"}'
            print(
                f"curl -s {cluster.url}/v1/completions -H 'content-type: application/json' "
                f"-H 'authorization: Bearer {cluster.api_key}' -d '{body}'"
            )
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
    except KeyboardInterrupt:
        pass
    except RuntimeError as exc:
        print(f"multinode: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
