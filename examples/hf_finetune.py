"""A language model fine-tuned with transformers' Trainer. It knows nothing of lastwords: run it with --auto.

lastwords run --auto --standalone --nproc-per-node 2 examples/hf_finetune.py
"""

import argparse
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

LENGTH = 64


class Characters(Dataset):
    """Pieces of a text, a character a token."""

    def __init__(self, text: bytes) -> None:
        pieces = len(text) // LENGTH
        self.pieces = torch.tensor([*text[: pieces * LENGTH]]).reshape(pieces, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="hf-out")
    parser.add_argument("--epochs", type=int, default=3)
    parsed = parser.parse_args()
    transformers.set_seed(0)
    text = Path(transformers.trainer.__file__).read_bytes()[:60_000]
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    arguments = transformers.TrainingArguments(
        parsed.out,
        num_train_epochs=parsed.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=Characters(text[:50_000]),
        eval_dataset=Characters(text[50_000:]),
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=10)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
