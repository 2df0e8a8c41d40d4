"""The demo in a parallel layout: train, `kill -9` one worker, resume, and compare with a run that was never killed.

python -m demo.transformer.run --layout hsdp      or fsdp, tp, pp, zero1, moe, ddp (4 ranks), fsdp-tp, pp-tp (8 ranks)
"""

from __future__ import annotations

import argparse
import os
import sys

from demo import story

WORDS = {
    "tp": "2 replicas x 2 ranks that share each layer (tensor parallelism)",
    "hsdp": "2 replicas x 2 shards (FSDP2)",
    "fsdp": "4 shards without a replica, and a copy of each in shared memory (FSDP2)",
    "pp": "a pipeline of 2 stages x 2 replicas",
    "zero1": "4 replicas, their optimizer's state sharded over pairs (ZeroRedundancyOptimizer)",
    "moe": "4 replicas, their experts spread over pairs",
    "ddp": "4 replicas",
    "fsdp-tp": "2 replicas x 2 shards (FSDP2) x 2 ranks that share each layer",
    "pp-tp": "a pipeline of 2 stages x 2 replicas x 2 ranks that share each layer",
}
RANKS = {"fsdp-tp": 8, "pp-tp": 8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=tuple(WORDS), default=os.environ.get("LAYOUT", "tp"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=1024, help="pieces of text in an epoch")
    story.add_arguments(parser)
    args = parser.parse_args()
    ranks, seed = RANKS.get(args.layout, 4), story.drawn(args.seed)
    title = (
        f"[bold]{ranks} ranks learn English, and one of them gets kill -9.[/]\n"
        f"[dim]A transformer over bytes: {WORDS[args.layout]}; seed {seed} chooses the victim.[/]\n"
    )
    shape = ("--layout", args.layout, "--epochs", str(args.epochs), "--windows", str(args.windows))
    plain, again = ("--plain",), int(args.layout == "fsdp")
    demo = story.Demo(title, "demo.transformer.train", ranks, shape, seed, args.out, plain, done_again=again)
    return story.tell(demo)


if __name__ == "__main__":
    sys.exit(main())
