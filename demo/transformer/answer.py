"""What a trained transformer says, on one process, out of a checkpoint of any layout.

python -m demo.transformer.answer ttp_checkpoints/ --width 64
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import safetensors
import torch
from torch import nn

import lastwords
from demo.transformer.model import Shape, Transformer

PROMPT = "The value of "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a checkpoint, or the directory that holds several: then the newest is taken")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--prompt", default=PROMPT)
    args = parser.parse_args()
    model = Transformer(Shape(width=args.width))
    loaded = lastwords.load_for_inference(args.path, model)
    print(f"step {loaded.global_step}: {continued(model, args.prompt)}")


def answer(model: nn.Module) -> torch.Tensor:
    """Logits of (bytes of the prompt, 256), without dropout. The model is left as it was."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(PROMPT.encode())]))
    model.train(training)
    return logits


def continued(model: Transformer, prompt: str, more: int = 100, seed: int = 1) -> str:
    """The prompt and `more` bytes that the model makes up, drawn with a stream of their own."""
    model.eval()
    context = model.positions.num_embeddings
    generator = torch.Generator().manual_seed(seed)
    said = list(prompt.encode())
    with torch.no_grad():
        for _ in range(more):
            logits = model(torch.tensor([said[-context:]]))[-1]
            likely = (logits / 0.5).softmax(-1)
            said.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(said).decode(errors="replace")


def weights_by_hand(path: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint as a whole, read with plain safetensors and put together as its manifest says.

    This is the naive way, to compare with: it takes all of the memory, and checks nothing.
    """
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    whole: dict[str, torch.Tensor] = {}
    for name, unit in manifest["units"].items():
        with safetensors.safe_open(path / unit["file"], framework="pt") as file:
            for spec in unit["tensors"]:
                prefix = f"unit/{name}/model/"
                if spec["name"].startswith(prefix):
                    part = file.get_tensor(spec["name"])
                    tensor = whole.setdefault(
                        spec["name"].removeprefix(prefix), torch.empty(spec["global_shape"], dtype=part.dtype)
                    )
                    place = tuple(slice(at, at + size) for at, size in zip(spec["offsets"], part.shape, strict=True))
                    tensor[place] = part
    return whole


if __name__ == "__main__":
    main()
