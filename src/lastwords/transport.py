"""What both ends of the wire have in common: how gRPC is imported and tuned, and what every call carries.

gRPC must not handle forks: data-loader workers are forked from a process that has sessions open, and gRPC's own fork
handlers can block there. The switch is read when grpc is imported, so grpc is imported here and nowhere else.

Lost hosts. A host that loses power sends nothing, so TCP alone notices after minutes. The controller pings every
session that has been silent for `keepalive_time_s` and breaks it if no answer comes within `keepalive_timeout_s`;
gRPC's own threads answer, so a trainer that holds the interpreter lock for seconds is not taken for lost.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc as _grpc

from lastwords.codec import JOB_KEY, PROTOCOL_KEY, PROTOCOL_VERSION, TOKEN_KEY
from lastwords.errors import ConfigError

__all__ = ["Keepalive", "call_metadata", "channel_options", "grpc", "host_port", "server_options", "start_of"]

grpc: Any = _grpc
"""The module itself; it comes without types."""

MESSAGE_BYTES_MAX = 64 << 20
"""State of 16 384 ranks is 2.5 MB; everything else is far smaller. gRPC's default of 4 MiB would be close."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When silence means that the other host is lost: after at most time_s + timeout_s."""

    time_s: float
    timeout_s: float


STRANGER_S = 3.0
"""A connection may go without a call for so long: far more than a rank, or `lastwords status`, needs to begin one."""

CLIENT_KEEPALIVE = Keepalive(time_s=5.0, timeout_s=5.0)
"""A rank is in no hurry to notice that the controller's host is lost: without it nothing can be saved anyway."""


def _common_options(keepalive: Keepalive) -> list[tuple[str, int]]:
    return [
        ("grpc.keepalive_time_ms", max(1, round(keepalive.time_s * 1000))),
        ("grpc.keepalive_timeout_ms", max(1, round(keepalive.timeout_s * 1000))),
        # gRPC's core has two time-outs for the same ping: without this one, 60 s (measured with 1.85).
        ("grpc.http2.ping_timeout_ms", max(1, round(keepalive.timeout_s * 1000))),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: silence is what a session consists of
        ("grpc.http2.bdp_probe", 0),  # would ping after every message to measure bandwidth, which nobody needs here
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ]


def channel_options() -> list[tuple[str, int]]:
    """Options of a rank's channel: no proxy, no sharing of connections, connection attempts without gRPC's back-off."""
    return [
        *_common_options(CLIENT_KEEPALIVE),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        # The minimum doubles as the time-out of one connection attempt, so it is not made shorter.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.min_reconnect_backoff_ms", 5000),
    ]


def server_options(keepalive: Keepalive, connections_max: int = 1 << 20) -> list[tuple[str, int]]:
    """Options of the controller's server. Two servers never share a port: the second one has to fail.

    A rank has one call open as long as it lives, so a connection without a call is a stranger's: it is shed after
    `STRANGER_S`, and beyond `connections_max` nobody new is let in (measured with gRPC 1.85, tests/integration).
    """
    return [
        *_common_options(keepalive),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_connection_idle_ms", round(STRANGER_S * 1000)),
        ("grpc.server_handshake_timeout_ms", round(STRANGER_S * 1000)),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 1 << 20),
    ]


def start_of(job: str, generation: int) -> str:
    """One start of a job, as its sessions name it: what is left of an older start is as foreign as another job.

    >>> start_of("digits", 2)
    'digits-g2'
    """
    return f"{job}-g{generation}"


def call_metadata(token: str, job: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata of every call; a session names its job, too. Raises ConfigError for a token that cannot be sent."""
    if not (1 <= len(token) <= 256 and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("the token (LASTWORDS_TOKEN) must be 1 to 256 visible ASCII characters")
    metadata = ((TOKEN_KEY, token), (PROTOCOL_KEY, str(PROTOCOL_VERSION)))
    return (*metadata, (JOB_KEY, job)) if job else metadata


def host_port(host: str, port: int) -> str:
    """Address as gRPC wants it.

    >>> host_port("127.0.0.1", 30051), host_port("::1", 30051), host_port("node-3", 30051)
    ('127.0.0.1:30051', '[::1]:30051', 'node-3:30051')
    """
    try:
        is_v6 = ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        is_v6 = False
    return f"[{host}]:{port}" if is_v6 else f"{host}:{port}"
