"""Which of a container's networks leads to a peer, and where a listener may be reached from."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from urllib.parse import urlsplit

from services.common.errors import NotReadyError

_SIOCGIFADDR = 0x8915


def route_nccl_towards(url: str) -> str:
    """Have NCCL, in this process, use the interface on the route to ``url``'s host.

    NCCL takes the first one it finds. The trainer has two, and of those only one reaches the policy: with the other,
    the group waits for a peer that cannot answer. ``NCCL_SOCKET_IFNAME`` that is set already stays.

    Returns: the variable's value. Raises: NotReadyError: the host is unknown, or no route leads to it.
    """
    if not os.environ.get("NCCL_SOCKET_IFNAME"):
        parts = urlsplit(url)
        try:
            name = interface_towards(parts.hostname or "", parts.port or 80)
        except OSError as error:
            raise NotReadyError(f"no network leads to {url}: {error}") from None
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # "=": this name exactly, not each one that begins with it
    return os.environ["NCCL_SOCKET_IFNAME"]


def interface_towards(host: str, port: int) -> str:
    """Name of the interface whose IPv4 address this machine uses to reach the host.

    Raises: OSError: the name does not resolve, no route leads to it, or the address is on no interface.
    """
    address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # UDP: picks the route, sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address(probe, name) == own:
                return name
    raise OSError(f"no interface has the address {own}, from which {host} is reached")


def only_from_its_network(listener: socket.socket, address: str) -> None:
    """Have a socket take what arrives on the interface of its own address, and nothing else.

    An address alone does not say so: Linux accepts on any interface what is meant for one of its addresses, and answers
    for all of them on each network. So whoever is on one network of a container reaches what it listens to on another.

    Args: address: the socket's; for all addresses, and for loopback, which no network leads to, nothing changes.
    Raises: OSError: no interface has it, or the kernel is older than 5.7 and wants a capability for this.
    """
    if address == "0.0.0.0" or address.startswith("127."):
        return
    for _, name in socket.if_nameindex():
        if _address(listener, name) == address:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode() + b"\0")
            return
    raise OSError(f"no interface has the address {address}")


def _address(probe: socket.socket, interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:  # an interface without an IPv4 address
        return None
