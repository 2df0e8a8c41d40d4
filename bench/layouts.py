"""Last words of each parallel layout: who writes how much, and how long it takes from the kill to the publication.

    python bench/layouts.py [--layouts tp hsdp ...] [--kills 3]

Runs the transformer demo, kills one rank with -9 at an instant that the seed chooses, and reads what the controller
noted and what was published. The resumed run is compared bit for bit as well, as the demo always does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = ("ddp", "tp", "hsdp", "pp", "zero1", "moe", "fsdp-tp")


def one_kill(layout: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The incident's record and the manifest; raises RuntimeError with the demo's output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "demo.transformer.run", "--layout", layout, "--epochs", "1"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        ended = subprocess.run(
            [*command, "--seed", str(seed), "--out", folder], cwd=ROOT, env=environ, capture_output=True, text=True
        )
        if ended.returncode:
            raise RuntimeError(f"{layout}, seed {seed}: {ended.stdout}{ended.stderr}")
        saved = Path(folder, "killed", "checkpoints")
        incident = json.loads((saved / "logs" / "incidents.jsonl").read_text().splitlines()[-1])
        manifest = json.loads(next(saved.glob("tft_saved_checkpoints-step_*/manifest.json")).read_text())
    return incident, manifest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--kills", type=int, default=3)
    arguments = parser.parse_args()
    print("layout   ranks units writers         bytes of each writer   known to published: median, slowest")
    for layout in arguments.layouts:
        times, shape = [], ""
        for seed in range(1, arguments.kills + 1):
            incident, manifest = one_kill(layout, seed)
            times.append(_published_ms(incident))
            sizes = [file["bytes"] for file in manifest["files"]]
            spread = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
            shape = f"{manifest['world_size']:>5} {len(manifest['units']):>5} {len(sizes):>7} {spread:>28}"
        print(f"{layout:<8} {shape} {statistics.median(times):>9.0f}, {max(times):.0f} ms", flush=True)
    return 0


def _published_ms(incident: dict[str, Any]) -> float:
    """Milliseconds from the first knowledge of the death to the final name."""
    at_s = next(event["mono_s"] for event in incident["events"] if event["what"] == "published")
    return 1000 * (float(at_s) - float(incident["known_mono_s"]))


if __name__ == "__main__":
    sys.exit(main())
