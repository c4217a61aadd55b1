"""Which of this host's addresses to use; the kernel's routes decide.

torchrun uses the host's name. On hosts with several networks, and in containers, that may be another address than the
one that other hosts reach.
"""

from __future__ import annotations

import socket
import time

from terrazzo.errors import LaunchError


def address_towards(endpoint: str, patience: float = 0) -> str:
    """The address from which this host reaches `host:port`; waits `patience` seconds for the name to become known.

    >>> address_towards("127.0.0.1:29400")
    '127.0.0.1'
    """
    until = time.monotonic() + patience
    while True:
        try:
            family, address = _resolve(endpoint)
            break
        except LaunchError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # a datagram socket: it only chooses a route, and sends nothing
        except OSError as error:
            raise LaunchError(f"there is no route from this host to {endpoint}: {error.strerror}") from error
        return str(probe.getsockname()[0])


def is_here(endpoint: str) -> bool:
    """Whether `host:port` is on this host.

    >>> is_here("127.0.0.1:29400")
    True
    """
    family, address = _resolve(endpoint)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0))
        except OSError:
            return False
    return True


def _resolve(endpoint: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = endpoint.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LaunchError(f"cannot find the address of host {host}: {error.strerror}") from error
    return family, (str(address[0]), int(address[1]))
