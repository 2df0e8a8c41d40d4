"""Asks a running controller what it knows; for the command line. Blocking, bounded."""

from __future__ import annotations

import os
from pathlib import Path

from lastwords import codec, descriptors
from lastwords.controller import handover
from lastwords.controller.spec import LOG_DIRECTORY, TOKEN_VARIABLE
from lastwords.errors import ConfigError, UnavailableError
from lastwords.state import ControllerState
from lastwords.transport import call_metadata, channel_options, grpc, host_port

QUERY_TIMEOUT_S = 5.0


def find_controller(root: Path | None = None) -> str:
    """Address of the one controller of this user on this host; of one that saves in `root`, where that is given.

    Raises UnavailableError if there is none, ConfigError naming all if there are several.
    """
    running = handover.running_here()
    if root is not None:
        running = [record for record in running if Path(record.log).parent == root.resolve() / LOG_DIRECTORY]
    if not running:
        which = "" if root is None else f" that saves in {root}"
        raise UnavailableError(
            f"no controller of this user{which} runs on this host; specify one: --controller HOST:PORT"
        )
    if len(running) > 1:
        known = ", ".join(f"{record.address} (job {record.job})" for record in running)
        raise ConfigError(f"several controllers run here, choose one with --controller: {known}")
    return running[0].address


def query_state(
    address: str, token: str | None = None, *, timeout_s: float = QUERY_TIMEOUT_S, with_ranks: bool = True
) -> ControllerState:
    """State of the controller at `address` ("HOST:PORT", "[IPv6]:PORT"); of 16 384 ranks it has 2.5 MB.

    Without a token, LASTWORDS_TOKEN is used, else the run file of a controller of this user on this host.
    Raises ConfigError (malformed address, wrong or no token) or UnavailableError (nobody answers, or this process is
    short of descriptors).
    """
    host, port = split_address(address)
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE) or _token_of(host, port)
    descriptors.look_for_grpc()
    with grpc.insecure_channel(host_port(host, port), options=channel_options()) as channel:
        method = channel.unary_unary(codec.STATE_METHOD)
        try:
            request = codec.state_request_to_bytes(without_ranks=not with_ranks)
            raw = method(request, metadata=call_metadata(token), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION):
                raise ConfigError(f"the controller at {address} rejected the request: {error.details()}") from error
            raise UnavailableError(f"no controller answers at {address}: {error.details()}") from error
    return codec.state_from_bytes(raw)


def split_address(address: str) -> tuple[str, int]:
    """Host and port; raises ConfigError for anything else.

    >>> split_address("[::1]:30051"), split_address("node-3:30051")
    (('::1', 30051), ('node-3', 30051))
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{address!r} is not the address of a controller; write HOST:PORT or [IPV6]:PORT")
    return host, int(port)


def _token_of(host: str, port: int) -> str:
    record = handover.read_run_file(handover.run_file_path(host, port))
    if record is None or not record.is_running:
        raise ConfigError(
            f"the token of the controller at {host_port(host, port)} is not known here: set {TOKEN_VARIABLE}, or ask "
            "as the same user on the controller's host"
        )
    return record.token
