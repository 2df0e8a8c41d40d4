"""`lastwords upload`: checkpoints go to a remote store, once or as they are published."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from lastwords import log_lines
from lastwords.checkpoint.remote.store import RemotePath, address_of
from lastwords.checkpoint.remote.uploader import Uploader, follow, wait_on
from lastwords.cli import checkpoint_commands as commands
from lastwords.cli.checkpoint_commands import Verdict
from lastwords.integrations.bars import bars

Add = Callable[[str, str], argparse.ArgumentParser]

_NICE = 10
"""Training goes first."""


def add_parser(add: Add) -> None:
    """Adds the command; `add(name, what)` makes a parser without arguments."""
    upload = add("upload", "upload the complete checkpoints in DIR to a remote store: docs/running.md")
    upload.add_argument("path", type=Path, metavar="DIR", help="the directory that holds the checkpoints")
    upload.add_argument("url", type=address_of, metavar="URL", help="a directory in a store, such as s3://bucket/job")
    upload.add_argument("--job", help="only checkpoints of this job")
    upload.add_argument("--fallback", type=Path, metavar="DIR", help="a second directory that holds checkpoints")
    how = upload.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="go on with new ones until standard input ends")
    how.add_argument("--verify", action="store_true", help="read all that is there, and send again what is damaged")
    upload.add_argument("--json", action="store_true", help="print one JSON document")


def upload(arguments: argparse.Namespace) -> Verdict:
    """Uploads, and prints what has been uploaded now. Raises StorageError if the store refuses."""
    root: Path = arguments.path
    to: RemotePath = arguments.url
    roots = [root, *([arguments.fallback] if arguments.fallback is not None else [])]
    if arguments.follow:
        output = logging.StreamHandler(sys.stderr)
        output.setFormatter(log_lines.formatter(logging.Formatter("%(asctime)s upload: %(message)s")))
        logging.basicConfig(level=logging.INFO, handlers=[output], force=True)
        log_lines.know(**({"job": arguments.job} if arguments.job else {}))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        uploader = Uploader(roots, to, arguments.job)
        everything = follow(uploader.upload_missing, wait_on(sys.stdin.fileno()))
        return Verdict.FINE if everything else Verdict.UNREADABLE
    if not root.is_dir():
        return commands.nothing(root, as_json=arguments.json, empty={"uploaded": []})
    with bars() as tell:
        uploaded = Uploader(roots, to, arguments.job, on_progress=tell).upload_missing(
            again=True, verify=arguments.verify
        )
    if arguments.json:
        commands.print_json({"uploaded": [{"path": str(one.path), "to": str(to / one.name)} for one in uploaded]})
    else:
        for one in uploaded:
            print(f"{to / one.name}")
    return Verdict.FINE
