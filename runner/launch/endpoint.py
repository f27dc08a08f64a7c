"""Where processes of several nodes meet: HOST:PORT. No torch here."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

LOOPBACK = "127.0.0.1"
MOST_WAIT_S = 7 * 24 * 3600.0


def wait_limit(seconds: float) -> timedelta:
    """How long a store waits: what a user gave in seconds, inf for no limit, as a time that a store can take."""
    return timedelta(seconds=min(seconds, MOST_WAIT_S))


class Unusable(Exception):
    """An endpoint where processes cannot meet, with the reason in one line."""


def parse(endpoint: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT, where an IPv6 address may have its brackets. Raises Unusable."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise Unusable(f"{endpoint}: must be HOST:PORT, for instance node0:29500")
    return host.strip("[]"), int(port)


def resolve(endpoint: str) -> tuple[str, int]:
    """The first address of an endpoint, and its port. Raises Unusable where the host has none."""
    host, port = parse(endpoint)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0], port  # type: ignore[return-value]
    except OSError as error:
        raise Unusable(f"{endpoint}: the host {host} has no address here ({error.strerror})") from None


def listen(host: str | None, port: int = 0) -> socket.socket:
    """A listening socket, at port 0 of any number: on the loopback alone without a host, or where that is there; else on all
    addresses of this machine, since its own name may resolve to the loopback here. Raises Unusable."""
    try:
        if host is None or host == "localhost" or host.startswith("127."):
            return socket.create_server((LOOPBACK, port), backlog=1024)
        if host == "::1":
            return socket.create_server((host, port), family=socket.AF_INET6, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        return socket.create_server(("0.0.0.0", port), backlog=1024)
    except OSError as error:
        raise Unusable(
            f"{host or LOOPBACK}:{port}: cannot listen there ({os.strerror(error.errno or 0)}); set another MASTER_PORT"
        ) from None


def local(listener: socket.socket) -> tuple[str, int]:
    """Where this machine itself reaches a listening socket."""
    address, port = listener.getsockname()[:2]
    return {"0.0.0.0": LOOPBACK, "::": LOOPBACK}.get(address, address), port
