"""The demo: train, `kill -9` one worker, resume, and compare with a run that was never killed, bit for bit.

python -m demo.run --seed 7        the same victim, step and delay as the last time with seed 7
"""

from __future__ import annotations

import argparse
import sys

from demo import story


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the two wide layers, 5120 in the design")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    story.add_arguments(parser)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks: of one rank nobody is left to save anything")
    seed = story.drawn(args.seed)
    title = (
        f"[bold]{args.ranks} ranks learn handwritten digits, and one of them gets kill -9.[/]\n"
        f"[dim]784-512-{args.hidden}-{args.hidden}-512-10, DDP, torchrun; seed {seed} chooses the victim.[/]\n"
    )
    shape = ("--epochs", str(args.epochs), "--batch-size", str(args.batch_size), "--hidden", str(args.hidden))
    return story.tell(story.Demo(title, "demo.train", args.ranks, shape, seed, args.out))


if __name__ == "__main__":
    sys.exit(main())
