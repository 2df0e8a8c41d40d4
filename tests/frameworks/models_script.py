"""A plain loop, as a user has it, over a model of transformers or torchvision: BERT, GPT-2, ViT, or a detector."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from tests.frameworks.script import CASE, DIRECTORY, PROTECTED, RANK, Texts, die, end, ended, final, masked

RANKS, EPOCHS, BATCH, STEPS = 2, 2, 2, 5
"""Steps of an epoch."""
PIXELS = 32
MADE_IN_THE_FIRST_STEP = "model.roi_heads.box_roi_pool.map_levels"
"""Of a detector: by the first forward pass, and never changed."""
BESIDE = Path(sys.prefix) / "torchvision"
WORDS_KNOWN, SIZES = 32, {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}

Loss = Callable[[nn.Module, Any], Tensor]


def of_texts(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def bert() -> tuple[nn.Module, Loss]:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS_KNOWN, **SIZES)), of_texts


def gpt2() -> tuple[nn.Module, Loss]:
    config = transformers.GPT2Config(
        vocab_size=WORDS_KNOWN, n_layer=2, n_head=2, n_embd=16, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), of_texts


def vit() -> tuple[nn.Module, Loss]:
    more = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = transformers.ViTConfig(image_size=PIXELS, patch_size=8, num_labels=WORDS_KNOWN, **more, **SIZES)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(pixel_values=pictures(batch), labels=batch["labels"][:, 0]).loss

    return transformers.ViTForImageClassification(config), loss


def pictures(batch: Any) -> Tensor:
    """Of these texts: noise around a grey that depends on their first word."""
    return torch.rand(len(batch["labels"]), 3, PIXELS, PIXELS) + batch["labels"][:, 0, None, None, None] / WORDS_KNOWN


def detector() -> tuple[nn.Module, Loss]:
    """A Faster R-CNN, which draws the boxes that it learns from."""
    without_operators()
    from torchvision.models import detection
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.rpn import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
    backbone.out_channels = 8
    net = detection.FasterRCNN(
        backbone,
        min_size=PIXELS,
        max_size=PIXELS,
        rpn_anchor_generator=AnchorGenerator(((8,),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2),
        box_head=TwoMLPHead(8 * 16, 16),
        box_predictor=FastRCNNPredictor(16, 3),
        rpn_post_nms_top_n_train=16,
        rpn_batch_size_per_image=8,
        box_batch_size_per_image=8,
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        corners = batch["labels"][:, :2].float() / 4
        boxes = torch.cat([corners, corners + 16], dim=1)
        targets = [{"boxes": box[None], "labels": torch.ones(1, dtype=torch.long)} for box in boxes]
        losses: dict[str, Tensor] = model([*pictures(batch)], targets)
        return torch.stack([*losses.values()]).sum()

    return net, loss


def without_operators() -> None:
    """torchvision's wheel is made for a GPU's torch: where its operators do not load, one of them in Python.

    It is in a directory of its own, since transformers imports one that it finds.
    """
    sys.path.append(str(BESIDE))
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
        from torchvision.ops import boxes, roi_align

        boxes.nms = in_python  # type: ignore[assignment]
        roi_align.is_compile_supported = lambda device: False  # type: ignore[attr-defined]


def in_python(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Of boxes that overlap, the one with the highest score."""
    from torchvision.ops import box_iou

    overlap, kept = box_iou(boxes, boxes) > iou_threshold, []
    for at in scores.argsort(descending=True, stable=True).tolist():
        if not any(overlap[at, one] for one in kept):
            kept.append(at)
    return torch.tensor(kept, dtype=torch.long)


MODELS = {"bert": bert, "gpt2": gpt2, "vit": vit, "detector": detector}


class Asked(nn.Module):
    """Counts on a generator, which nobody can store."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number / 100 for number in range(1000))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + next(self.numbers)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    name, *variants = CASE.split()
    net, loss_of = MODELS[name]()
    if "asks" in variants:
        net.bert.embeddings.dropout = Asked()
    torch.manual_seed(11 + RANK)
    model, optimizer = DDP(net), torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 3, EPOCHS * STEPS)
    texts = Texts(RANKS * STEPS * BATCH)
    data = DataLoader(texts, BATCH, sampler=DistributedSampler(texts), collate_fn=masked)
    step, tft = 0, None
    if PROTECTED:
        import lastwords

        tft = lastwords.protect(
            DIRECTORY / "ckpt",
            model=model,
            optimizer=optimizer,
            extras={"schedule": schedule},
            in_place=True,
            forget=(MADE_IN_THE_FIRST_STEP,) if "forgets" in variants else (),
        )
    with tft or contextlib.nullcontext():
        if tft is not None:
            point = tft.resume(missing_ok=True)
            step = 0 if point is None else point.global_step
        for epoch in [None] if tft is not None else range(EPOCHS):
            if epoch is not None:
                data.sampler.set_epoch(epoch)
            for batch in (one[-1] for one in tft.steps(data, EPOCHS)) if tft is not None else data:
                step += 1
                loss = loss_of(model, batch)
                die(step, "fwd")
                loss.backward()
                die(step, "bwd")
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                die(step, "win")
                schedule.step()
                optimizer.zero_grad()
                ended(step, net.state_dict(), optimizer.state_dict()["state"], loss.detach())
    final(net.state_dict(), schedule.state_dict())
    end()


if __name__ == "__main__":
    main()
