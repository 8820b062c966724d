"""Inside the namespaces of `deploy.multinode`: the network, Ray's nodes, Serve.

`python -m deploy.multinode_inside run PLAN` is the first process of the new PID namespace: when it
ends, all others do. `status ADDRESS`, run in the head's network, prints what the service says.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BRIDGE = "bridge"
RAY_FOLDER = "ray"
GCS_PORT, HTTP_PORT, GRPC_PORT = 6379, 8000, 9000
OBJECT_STORE_BYTES = 128 << 20
START_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.25
ROLE_LABEL = "quadriga/role"
FIXED_PORTS = {
    "node-manager-port": 6381,
    "object-manager-port": 6382,
    "runtime-env-agent-port": 6383,
    "dashboard-agent-grpc-port": 6384,
    "dashboard-agent-listen-port": 6385,
    "metrics-export-port": 8080,
}
"""Free in every network of its own; a node that has to find ports waits for others to tell them."""
AGENT_TIMEOUT_MS = 120_000
ON_A_NODE = """mount --bind "$1" "$2" && shift 2
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
exec "$@"
"""
"""Gives a process its node's own files in place of the folder that all nodes name alike.

And no name servers: none is reached from there, and torch would ask, for 5 s, whom it connects to.
"""


@dataclass(frozen=True, slots=True)
class Node:
    """One Ray node.

    Attributes:
        name: Of its network namespace; its interface outside is called `to-<name>`.
        role: Its Ray label `quadriga/role`.
    """

    name: str
    role: str
    address: str
    num_cpus: int


def nodes(subnet: str, *, num_prefill: int, num_decode: int) -> tuple[Node, ...]:
    """A head without CPUs for replicas, and a node of one CPU for each replica."""
    roles = ["head"] + ["prefill"] * num_prefill + ["decode"] * num_decode
    found: list[Node] = []
    for i, role in enumerate(roles):
        name = role if role == "head" else f"{role}-{roles[:i].count(role)}"
        found.append(Node(name, role, f"{subnet}.{i + 1}", 0 if role == "head" else 1))
    return tuple(found)


def run_command(*command: str) -> str:
    """Raises: RuntimeError: It failed; with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def serve_config(cluster: Sequence[Node], config: dict[str, Any]) -> dict[str, Any]:
    """What Serve is told: replicas on the nodes of their role, HTTP on every node's address."""
    from quadriga.config.loader import expand_dotted
    from serve_app.cli.environment import GRPC_SERVICERS

    count = {role: sum(n.role == role for n in cluster) for role in ("prefill", "decode")}
    own: dict[str, Any] = {
        "model": "quadriga-s",
        "prefill_replicas": count["prefill"],
        "decode_replicas": count["decode"],
        "prefill_labels": {ROLE_LABEL: "prefill"},
        "decode_labels": {ROLE_LABEL: "decode"},
        "engine": {"device": "cpu", "resources_cpus": 1},
    }
    given = expand_dotted(config)
    engine = own["engine"] | given.pop("engine", {})
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
        "grpc_options": {"port": GRPC_PORT, "grpc_servicer_functions": list(GRPC_SERVICERS)},
        "applications": [
            {
                "name": "quadriga",
                "route_prefix": "/",
                "import_path": "serve_app.app:build",
                "args": own | given | {"engine": engine},
            }
        ],
    }


class Inside:
    """What runs as the first process of the new namespaces; when it ends, all others do."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._nodes = [Node(**node) for node in plan["nodes"]]
        self._folder = Path(plan["folder"])
        self._bridge_address = plan["bridge_address"]
        self._disk_bytes = int(plan["disk_bytes"])
        self._ray_folder = f"{self._folder}/{RAY_FOLDER}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Make the network, start Ray and Serve, then answer verbs until the input ends."""
        from serve_app.cli.environment import prepare_environment

        prepare_environment()
        self._make_network()
        print("network", flush=True)
        self._start_ray()
        print("ray", flush=True)
        self._start("serve", self._nodes[0], *self._serve_command())
        print("serve", flush=True)
        for line in sys.stdin:
            verb, _, name = line.strip().partition(" ")
            if verb == "status":
                print(self._status(), flush=True)
            elif verb == "start":
                print(self._start_again(name), flush=True)

    def _make_network(self) -> None:
        Path("/run/netns").mkdir(parents=True, exist_ok=True)
        run_command("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        run_command("ip", "link", "set", "lo", "up")
        run_command("ip", "link", "add", BRIDGE, "type", "bridge")
        run_command("ip", "addr", "add", f"{self._bridge_address}/24", "dev", BRIDGE)
        run_command("ip", "link", "set", BRIDGE, "up")
        Path(self._ray_folder).mkdir()
        for node in self._nodes:
            files = self._folder / node.name
            files.mkdir()
            if self._disk_bytes:
                run_command(
                    "mount", "-t", "tmpfs", "-o", f"size={self._disk_bytes}", "tmpfs", str(files)
                )
            outside, name = f"to-{node.name}", node.name
            run_command("ip", "netns", "add", name)
            run_command("ip", "link", "add", outside, "type", "veth", "peer", "eth0", "netns", name)
            run_command("ip", "link", "set", outside, "master", BRIDGE, "up")
            run_command("ip", "-n", name, "addr", "add", f"{node.address}/24", "dev", "eth0")
            run_command("ip", "-n", name, "link", "set", "lo", "up")
            run_command("ip", "-n", name, "link", "set", "eth0", "up")
            # Leads nowhere, but Ray finds a node's own address by looking for a way out.
            run_command("ip", "-n", name, "route", "add", "default", "via", self._bridge_address)

    def _start_ray(self) -> None:
        """Start the nodes one after the other: together they keep each other from starting in time.

        Raises: RuntimeError: One does not answer in time.
        """
        for node in self._nodes:
            self._start(node.name, node, *self._ray_command(node))
            if node is self._nodes[0]:
                self._await_port(node, GCS_PORT)
            self._await_port(node, FIXED_PORTS["node-manager-port"])

    def _start_again(self, name: str) -> str:
        """Start a node whose processes have ended; returns "started", or what went wrong."""
        node = next(n for n in self._nodes if n.name == name)
        try:
            self._processes[name].wait(COMMAND_TIMEOUT_S)  # its last one may be ending just now
        except subprocess.TimeoutExpired:
            return "its processes have not ended"
        # Others may be away as well.
        self._processes = {n: p for n, p in self._processes.items() if p.poll() is None}
        self._start(node.name, node, *self._ray_command(node))
        try:
            self._await_port(node, FIXED_PORTS["node-manager-port"])
        except RuntimeError as exc:
            return str(exc).replace("\n", " ")
        return "started"

    def _await_port(self, node: Node, port: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((node.address, port), timeout=1).close()
                return
            except OSError:
                self._check_alive()
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"{node.name} does not answer at port {port}") from None
                time.sleep(POLL_INTERVAL_S)

    def _ray_command(self, node: Node) -> list[str]:
        head = self._nodes[0]
        role = (
            [
                "--head",
                f"--port={GCS_PORT}",
                "--include-dashboard=false",
                f"--temp-dir={self._ray_folder}",
            ]
            if node is head
            else [f"--address={head.address}:{GCS_PORT}"]
        )
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
            f"--node-ip-address={node.address}",
            f"--num-cpus={node.num_cpus}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--labels={ROLE_LABEL}={node.role}",
            *(f"--{name}={port}" for name, port in FIXED_PORTS.items()),
        ]

    def _serve_command(self) -> list[str]:
        address = f"--address={self._nodes[0].address}:{GCS_PORT}"
        config = str(self._folder / "serve.yaml")
        return [sys.executable, "-m", "ray.serve.scripts", "run", address, config]

    def _on_node(self, node: Node, *command: str) -> list[str]:
        """A command as it is run in a node's network and with its files."""
        shell = ["sh", "-ec", ON_A_NODE, "sh", f"{self._folder}/{node.name}", self._ray_folder]
        return ["ip", "netns", "exec", node.name, *shell, *command]

    def _start(self, name: str, node: Node, *command: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                self._on_node(node, *command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _check_alive(self) -> None:
        for process in self._processes.values():
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}")

    def _status(self) -> str:
        """One line of JSON; asked in a process on the head, as Ray must see its network."""
        address = f"{self._nodes[0].address}:{GCS_PORT}"
        command = [sys.executable, "-m", "deploy.multinode_inside", "status", address]
        try:
            return run_command(*self._on_node(self._nodes[0], *command)).splitlines()[-1]
        except (RuntimeError, subprocess.TimeoutExpired) as exc:
            return json.dumps({"failure": str(exc)})


def print_status(address: str) -> None:
    """Print the controller's status and the nodes' addresses as a line of JSON."""
    import ray

    from actors.rpc.lifecycle import controller_name
    from actors.rpc.lookup import NAMESPACE

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    controller: Any = ray.get_actor(controller_name("quadriga"), namespace=NAMESPACE)
    status = ray.get(controller.status.remote(), timeout=COMMAND_TIMEOUT_S)
    status["addresses"] = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}  # type: ignore[no-untyped-call]
    print(json.dumps(status))


def main() -> None:
    verb, argument = sys.argv[1:]
    if verb == "status":
        print_status(argument)
    else:
        Inside(json.loads(Path(argument).read_text(encoding="utf-8"))).run()


if __name__ == "__main__":
    main()
