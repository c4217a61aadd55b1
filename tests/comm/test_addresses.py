"""By which address others reach this host: what the environment says, or the route to the master."""

import ipaddress
import socket

import pytest

from terrazzo.comm.addresses import own_address
from terrazzo.errors import CommError


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERRAZZO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", ["TERRAZZO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_an_interface_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")  # not asked
    monkeypatch.setenv(variable, "absent0, lo")
    assert own_address() == "127.0.0.1"


def test_every_interface_has_an_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for _, name in socket.if_nameindex():
        monkeypatch.setenv("TERRAZZO_SOCKET_IFNAME", name)
        try:
            address = own_address()
        except CommError:  # one that is down
            continue
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.create_server((address, 0), family=family):  # one can listen there: it is this host's
            found.add(address)
    assert "127.0.0.1" in found


def test_ours_counts_before_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TERRAZZO_SOCKET_IFNAME", "absent0")
    with pytest.raises(CommError, match=r"TERRAZZO_SOCKET_IFNAME=absent0: .*it has .*lo"):
        own_address()


def test_the_route_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(CommError, match="'no.such.host.invalid'.*set TERRAZZO_SOCKET_IFNAME"):
        own_address()
