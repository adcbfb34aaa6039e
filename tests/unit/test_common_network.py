"""NCCL is pointed at the interface on the route to the peer, on this machine's real interfaces."""

import pytest

from services.common import network
from services.common.errors import NotReadyError


def test_loopback_is_reached_over_lo() -> None:
    assert network.interface_towards("127.0.0.1", 80) == "lo"


def test_nccl_takes_the_interface_on_the_route_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    assert network.route_nccl_towards("http://localhost:8000") == "=lo"


def test_what_the_operator_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert network.route_nccl_towards("http://no.such.host.invalid:8000") == "ib0"


def test_unknown_host_is_a_peer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    with pytest.raises(NotReadyError, match=r"no network leads to http://no\.such\.host\.invalid:8000"):
        network.route_nccl_towards("http://no.such.host.invalid:8000")
