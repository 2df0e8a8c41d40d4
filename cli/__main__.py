"""The command `lastwords`, and `python -m lastwords.cli` for where it is not on the path."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Its exit code. Ctrl-C ends it without a traceback, while it imports as well."""
    try:
        from lastwords.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
