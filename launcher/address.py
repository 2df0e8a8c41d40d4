"""Where the scheduler of a cluster listens: at those addresses of MS_SCHED_HOST that are this host's, and nowhere else.

At all addresses only where that cannot be known: the address of a gateway that passes connections on (NAT, a virtual
address of a cluster manager) is no address of this host; and a name that is a loopback address here, as Debian's
/etc/hosts has it for the host's own name, is another address on the other hosts.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from typing import Any

from lastwords.errors import ConfigError
from lastwords.launcher.environment import Cluster
from lastwords.launcher.link import listening

_log = logging.getLogger(__name__)

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""What the kernel says of an address that it does not have, or of a kind that is switched off."""


def listen(cluster: Cluster, backlog: int) -> list[socket.socket]:
    """Where its scheduler is reached. ConfigError."""
    try:
        return servers(cluster.host, cluster.port, backlog)
    except OSError as error:
        raise ConfigError(
            f"the scheduler cannot listen at {cluster.address}: {os.strerror(error.errno or 0)}; choose another "
            "MS_SCHED_PORT for all processes of the cluster, or end what uses it"
        ) from error


def servers(host: str, port: int, backlog: int) -> list[socket.socket]:
    """For connections to `host`; one or more. ConfigError for a name that is not known here, OSError."""
    found = _resolved(host, port)
    made: list[socket.socket] = []
    try:
        for family, address in found:
            try:
                made.append(listening(port, backlog, (family, address)))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
    except OSError:
        _close(made)
        raise
    if made and (_means_this_host(host) or not all(_is_loopback(one.getsockname()[0]) for one in made)):
        return made
    addresses = ", ".join(dict.fromkeys(str(address[0]) for _, address in found))
    _log.warning(
        "MS_SCHED_HOST=%s%s %s; the scheduler listens at all addresses of this host",
        host,
        "" if addresses == host else f" ({addresses} on this host)",
        "cannot be reached from other hosts" if made else "is no address of this host",
    )
    _close(made)
    return [listening(port, backlog)]


def _resolved(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MS_SCHED_HOST is {host!r}, which this host cannot resolve: {error.strerror}; set it to an address or a "
            "name of the scheduler's host, in all processes of the cluster"
        ) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _means_this_host(host: str) -> bool:
    """Whether whoever wrote `host` has named this very host, if it is a loopback address."""
    return "localhost" in host.lower() or _is_address(host)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _close(made: list[socket.socket]) -> None:
    for server in made:
        server.close()
