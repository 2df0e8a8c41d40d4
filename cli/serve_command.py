"""`lastwords serve`: a job in a browser, and for Prometheus. Imported on demand: it brings gRPC and the extra."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lastwords.controller.takeover import split_address
from lastwords.errors import ConfigError, StorageError


def serve(arguments: argparse.Namespace) -> None:
    """Until it is interrupted. ConfigError for what makes no sense, StorageError for a PATH that cannot be read."""
    root: Path | None = arguments.path
    if arguments.controller is not None:
        split_address(arguments.controller)
    host, port = split_address(arguments.http)
    try:
        from lastwords.page.server import serve, token_in
        from lastwords.page.watch import JobWatch
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lastwords"):
            raise
        raise ConfigError(f'lastwords serve needs {error.name}: pip install "lastwords[page]"') from error
    if root is not None:
        _look_into(root)
    token = None if arguments.token_file is None else token_in(arguments.token_file)
    serve(JobWatch(root and root.absolute(), arguments.controller), host, port, token)


def _look_into(root: Path) -> None:
    """It need not be there yet."""
    try:
        os.listdir(root)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"cannot read {root}: {error.strerror}", errno=error.errno or 0) from error
