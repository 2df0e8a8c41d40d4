"""A script with a Trainer of transformers, as a user has it: evaluation, logs, checkpoints, early stopping."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info

from tests.frameworks.script import (
    CASE,
    DIRECTORY,
    RANK,
    RANKS,
    WORDS,
    Texts,
    checkpoints,
    die,
    digest,
    end,
    ended,
    final,
    masked,
    protect_trainer,
    shown,
    telling,
    timeless,
)

EPOCHS, STEPS, ACCUMULATE, BATCH = 3, 6, 2, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "bf16": {"bf16": True},
    "shards": {"accelerator_config": {"dispatch_batches": False}},
    "noise": {
        "label_smoothing_factor": 0.1,
        "neftune_noise_alpha": 5.0,
        "gradient_checkpointing": True,
        "average_tokens_across_devices": True,
        "include_num_input_tokens_seen": "all",
    },
    "best": {"eval_on_start": True, "save_strategy": "best"},
    "skips": {"ignore_data_skip": True, "dataloader_drop_last": True, "logging_first_step": True},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, "warmup_steps": 0},
    "scaler": {"fp16": True},
    "persistent": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
}
"""Arguments of a Trainer, by a word of the case."""


class Probe(transformers.TrainerCallback):  # type: ignore[misc]
    """Looks at each step, and dies where the plan says so."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        die(state.global_step + 1, "win")

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **of: Any) -> None:
        die(state.global_step, "stepping")
        if CASE == "waits":
            torch.distributed.barrier()
        rates = [one["lr"] for one in optimizer.param_groups]
        averaged = [] if AVERAGE.model is None else AVERAGE.model.state_dict()
        scales = [one.state_dict() for one in SCALERS]
        ended(state.global_step, model.state_dict(), optimizer.state_dict()["state"], rates, averaged, scales)

    def on_evaluate(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        die(state.global_step, "evaluated")

    def on_save(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        die(state.global_step, "saved")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        die(state.global_step, "epoch")


class LeavesEpochs(transformers.TrainerCallback):  # type: ignore[misc]
    """After their fourth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        control.should_epoch_stop = state.global_step % 4 == 0


class Counts(transformers.TrainerCallback):  # type: ignore[misc]
    """State in plain attributes: of what it counts depends how fast the Trainer learns, and whether it saves."""

    def __init__(self) -> None:
        self.evaluated, self.best, self.bad, self.history = 0, float("inf"), 0, [0.0]

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **of: Any) -> None:
        self.evaluated += 1
        self.history.append(metrics["eval_loss"])
        self.bad = 0 if metrics["eval_loss"] < self.best - 0.1 else self.bad + 1
        self.best = min(self.best, metrics["eval_loss"])

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **of: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9**self.bad / (1 + 0.01 * sum(self.history))

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        control.should_save = control.should_save or self.evaluated % 2 == 1


class Average(transformers.TrainerCallback):  # type: ignore[misc]
    """Of the weights, in a copy of the model."""

    def __init__(self) -> None:
        self.model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **of: Any) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **of: Any) -> None:
        for mean, one in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(one.detach(), 0.1)


class Curriculum(transformers.TrainerCallback):  # type: ignore[misc]
    """Makes what comes of the data set harder with each step."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self.data.seen += state.global_step


class Keeps(transformers.TrainerCallback):  # type: ignore[misc]
    """On the Trainer's state: numbers by number, and a tensor."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        state.by_kind, state.sums = getattr(state, "by_kind", {}), getattr(state, "sums", torch.zeros(2))

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any, **of: Any) -> None:
        kind = state.global_step % 3
        state.by_kind[kind] = state.by_kind.get(kind, 0) + 100
        state.sums[kind % 2] += 1
        optimizer.param_groups[0]["weight_decay"] = 0.001 * state.by_kind.get(0, 0) + 0.01 * float(state.sums[0])


class Bar(transformers.ProgressCallback):  # type: ignore[misc]
    """Where it is shown."""

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        super().on_step_end(args, state, control, **of)
        self.look(f"end of {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        super().on_evaluate(args, state, control, **of)
        self.look(f"evaluation of {state.global_step}")

    def look(self, when: str) -> None:
        if self.training_bar is not None:
            shown(when, self.training_bar.n, self.training_bar.total)


class Clips(transformers.TrainerCallback):  # type: ignore[misc]
    """More with each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        args.max_grad_norm = max(0.05, args.max_grad_norm * 0.8)


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Texts without a length, shuffled within a buffer by a generator of its own."""

    def __init__(self, count: int) -> None:
        self.texts = Texts(count)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        draws, buffer = random.Random(self.epoch), []
        worker = get_worker_info()
        for number in range(0 if worker is None else worker.id, len(self.texts), 1 if worker is None else 2):
            buffer.append(self.texts[number])
            if len(buffer) == 8:
                yield buffer.pop(draws.randrange(8))
        yield from buffer


class Augmented(Texts):
    """By a generator that it has."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.draws = np.random.default_rng(5)
        self.seen = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen += 1
        row = super().__getitem__(index)
        return {**row, "input_ids": row["input_ids"].roll(int(self.draws.integers(3)) + self.seen % 2)}


class Unequal(Texts):
    """Of one to WORDS words."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: words[: 1 + index % WORDS] for name, words in super().__getitem__(index).items()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As long as the longest of them."""
    left_out = {"input_ids": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value) for name, value in left_out.items()
    }


class Trainer(transformers.Trainer):  # type: ignore[misc]
    mean, seen = 0.0, 0

    def training_step(self, model: Any, inputs: Any, *of: Any, **more: Any) -> Any:
        if "own step" in CASE:
            self.seen += 1
            inputs = {**inputs, "input_ids": (inputs["input_ids"] + self.seen) % 32}
        return super().training_step(model, inputs, *of, **more)

    def get_train_dataloader(self) -> Any:
        if "own loader" not in CASE:
            return super().get_train_dataloader()
        loader = DataLoader(self.train_dataset, BATCH, sampler=WeightedRandomSampler([1.0, 2.0] * 8, 96))
        return self.accelerator.prepare(loader)

    def save_model(self, *of: Any, **more: Any) -> None:
        super().save_model(*of, **more)
        die(self.state.global_step, "saving")  # the optimizer and all else of the checkpoint come after the weights

    def compute_loss(self, model: Any, *of: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, *of, **more)
        if "own loss" in CASE and model.training:
            self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
            loss = loss * (1 + 0.1 * self.mean)
        if "nan" in CASE and model.training and self.state.global_step in (2, 3, 7):
            loss = loss + (float("nan") if RANK == 0 and self.state.global_step == 3 else 0.0) * loss.detach()
        die(self.state.global_step + (1 if model.training else 0), "fwd" if model.training else "evaluating")
        return loss


AVERAGE = Average()
SCALERS = [torch.amp.GradScaler("cpu", 2.0**20, growth_interval=3)] if CASE == "scaler" else []
"""Its first updates overflow, and are left out."""


class Overrides(Trainer):
    def _inner_training_loop(self, *of: Any, **more: Any) -> Any:
        return super()._inner_training_loop(*of, **more)


class Collator:
    """Counts what it has made, and changes the words by that."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.made += 1
        return {name: (torch.stack([row[name] for row in rows]) + self.made) % WORDS for name in rows[0]}


class DrawingCollator:
    """Changes some words, by generators that it has."""

    def __init__(self) -> None:
        self.own, self.numpys = torch.Generator().manual_seed(5), np.random.RandomState(3)

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        noise = torch.rand(made["input_ids"].shape, generator=self.own) < 0.2
        return {**made, "input_ids": torch.where(noise, int(self.numpys.randint(WORDS)), made["input_ids"])}


def main() -> None:
    transformers.set_seed(7)
    config = transformers.GPT2Config(vocab_size=32, n_positions=WORDS, n_embd=16, n_layer=1, n_head=2)
    model: Any = transformers.GPT2LMHeadModel(config)
    if "lora" in CASE:
        import peft

        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    by_epoch = "epoch" in CASE
    settings: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "max_steps": 18 if "stream" in CASE else -1,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "logging_steps": 2,
        "eval_strategy": "epoch" if by_epoch else "steps",
        "eval_steps": 3,
        "save_strategy": "epoch" if by_epoch else "steps",
        "save_steps": 3,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "dataloader_num_workers": 2 if "workers" in CASE else 0,
        "train_sampling_strategy": "group_by_length" if "lengths" in CASE else "random",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    for word, values in VARIANTS.items():
        settings |= values if word in CASE else {}
    arguments = transformers.TrainingArguments(str(DIRECTORY / "out"), **settings)
    count = RANKS * STEPS * ACCUMULATE * BATCH
    kinds = {"stream": Stream, "augmented": Augmented, "lengths": Unequal}
    data: Any = next((kind for word, kind in kinds.items() if word in CASE), Texts)(count)
    optimizers: Any = (None, None)
    if "own optimizer" in CASE:
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizers = (sgd, torch.optim.lr_scheduler.CyclicLR(sgd, 0.01, 0.1, 5))
    trainer = (Overrides if "overrides" in CASE else Trainer)(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=Texts(16),
        data_collator=Collator()
        if "own collator" in CASE
        else DrawingCollator()
        if "collator has generators" in CASE
        else masked
        if "draws" in CASE
        else padded
        if "lengths" in CASE
        else None,
        callbacks=[
            transformers.EarlyStoppingCallback(*((2, 100.0) if "stops" in CASE else (3,))),
            *([Counts()] if "counts" in CASE else []),
            *([Curriculum(data)] if "curriculum" in CASE else []),
            *([Clips()] if "clips" in CASE else []),
            *([Keeps()] if "keeps" in CASE else []),
            *([AVERAGE] if "average" in CASE else []),
            *([Bar()] if "bar" in CASE else []),
            *([LeavesEpochs()] if "leaves epochs" in CASE else []),
            Probe(),
        ],
        optimizers=optimizers,
    )
    if SCALERS:  # as where there is a GPU: on a CPU accelerate makes none, and trains in single precision
        trainer.accelerator.scaler, trainer.accelerator.native_amp = SCALERS[0], True
    protect_trainer(trainer)
    if "resumes by itself" in CASE:
        trainer.train(resume_from_checkpoint=True)
    with telling():
        done = trainer.train()
    if "twice" in CASE:
        trainer.train()
    if "two trainers" in CASE:
        transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=Texts(16)).train()
    checkpoints(DIRECTORY / "out")
    logged = [timeless(trainer.state.log_history), done.training_loss, trainer.state.best_model_checkpoint is not None]
    if not CASE:
        logged.append(digest(torch.as_tensor(trainer.predict(Texts(8)).predictions)))
    (DIRECTORY / f"log-{RANK}").write_text(json.dumps(logged))
    final(model.state_dict(), torch.get_rng_state())
    end()


if __name__ == "__main__":
    main()
