"""`python -m lastwords.cli`, for where the command `lastwords` is not on the path."""

from __future__ import annotations

import sys

from lastwords.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
