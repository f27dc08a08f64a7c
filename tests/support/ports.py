"""Ports of the loopback for tests."""

import contextlib
import os
import socket
from pathlib import Path


def free_port():
    """A free port below the kernel's ephemeral range. Processes look from ports that are sixteen apart."""
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in range(given_out // 2 + 16 * (os.getpid() % 1000), given_out):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")
