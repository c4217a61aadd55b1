"""By which address other hosts reach this one.

`TERRAZZO_SOCKET_IFNAME`, or else `GLOO_SOCKET_IFNAME`, names one or several network interfaces. The first of them that
exists and has an address is used. Without these variables it is the interface by which `MASTER_ADDR` is reached: a
host's name is no help, since on many systems it stands for a loopback address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from terrazzo.errors import CommError

_VARIABLES: Final = ("TERRAZZO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR
_GLOBAL: Final = "00"  # the scope of an address of IPv6 that is good beyond its link


def listen_at(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address of this host, of IPv4 or IPv6, and no other; by default at a free port.

    >>> with listen_at("127.0.0.1") as listening:
    ...     listening.getsockname()[0]
    '127.0.0.1'
    """
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def own_address() -> str:
    """An address of this host that others reach; raises `CommError` where it is not to be found.

    >>> import os
    >>> os.environ["TERRAZZO_SOCKET_IFNAME"] = "lo"
    >>> own_address()
    '127.0.0.1'
    >>> del os.environ["TERRAZZO_SOCKET_IFNAME"]
    """
    for variable in _VARIABLES:
        if named := os.environ.get(variable, ""):
            return _address_of_first(variable, named)
    master = os.environ.get("MASTER_ADDR", "") or socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommError(
            f"{master!r} (MASTER_ADDR, or this host's name) cannot be resolved or reached ({error}), so it is not "
            f"known by which address others reach this host: set {_VARIABLES[0]} to the name of a network interface"
        ) from error


def _address_of_first(variable: str, named: str) -> str:
    for name in filter(None, (each.strip() for each in named.split(","))):
        if (address := _address_of(name)) is not None:
            return address
    there = ", ".join(name for _, name in socket.if_nameindex())
    raise CommError(f"{variable}={named}: no such network interface of this host has an address; it has {there}")


def _address_of(interface: str) -> str | None:
    """The address of an interface: that of IPv4 if it has one."""
    from fcntl import ioctl  # not on every system

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and (scope == _GLOBAL or interface.startswith("lo")):
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
