"""Sizes, counts and depths that nobody has written end in an error of ours, in little memory and in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.document import encode_document
from lastwords.checkpoint.manifest import Manifest
from tests.optim_wrapper.test_forged_meta import FORGERIES, Live, use

ROOT = Path(__file__).parents[2]


@pytest.mark.ci
def test_forged_sizes_end_in_an_error_of_ours(tmp_path: Path) -> None:
    """Run with LASTWORDS_FORGERIES=3000 to look for what these do not meet."""
    command = [sys.executable, "-m", "tests.optim_wrapper.forging", str(tmp_path), "0", str(FORGERIES)]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert (ended.stdout, ended.returncode) == ("", 0), ended.stderr[-2000:]


def test_a_number_that_no_checkpoint_has_is_refused_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live()
    path = live.save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest.pop("checksum")
    late = {"published_unix_ns": 10**400}
    manifest |= late
    (path / "manifest.json").write_bytes(encode_document(manifest))
    assert use(tmp_path, path, live) == []

    def unbounded(value: Any, kind: Any, path: str) -> Any:
        if kind is not Manifest:
            return typed(value, kind, path)
        return replace(typed({**value, "published_unix_ns": 1}, Manifest, path), **late)

    monkeypatch.setattr("lastwords.checkpoint.manifest.typed", unbounded)  # the control
    assert any("ls: OverflowError" in text for text in use(tmp_path, path, live))
