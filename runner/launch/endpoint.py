"""HOST:PORT where the nodes of a world meet. No torch here."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

LOOPBACK = ("127.0.0.1", 0)
MOST_WAIT_S = 7 * 24 * 3600.0


def wait_limit(seconds: float) -> timedelta:
    """How long a store waits: what a user gave in seconds, inf for no limit, as a time that a store can take."""
    return timedelta(seconds=min(seconds, MOST_WAIT_S))


class Unusable(Exception):
    """An endpoint where nodes cannot meet, with the reason in one line."""


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
        raise Unusable(f"launch.endpoint={endpoint}: the host {host} has no address here ({error.strerror})") from None


def listen(endpoint: str | None) -> socket.socket:
    """A listening socket: on the loopback alone without an endpoint, or where that is there; else on all addresses of
    this machine, since its own name may resolve to the loopback here. Raises Unusable."""
    if endpoint is None:
        return _listening(LOOPBACK)
    address, port = resolve(endpoint)
    host, _ = parse(endpoint)
    try:
        if host == "localhost" or host.startswith("127.") or host == "::1":
            return _listening((address, port))
        if socket.has_dualstack_ipv6():
            return _listening(("::", port), dualstack_ipv6=True)
        return _listening(("0.0.0.0", port))
    except OSError as error:
        raise Unusable(
            f"launch.endpoint={endpoint}: cannot listen there ({os.strerror(error.errno or 0)}); give another port"
        ) from None


def _listening(address: tuple[str, int], dualstack_ipv6: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=dualstack_ipv6)


def local(listener: socket.socket) -> tuple[str, int]:
    """Where this machine itself reaches a listening socket."""
    address, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address, address), port
