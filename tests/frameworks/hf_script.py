"""A script with a Trainer of transformers, as a user has it: evaluation, logs, checkpoints, early stopping."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers

from tests.frameworks.script import CASE, DIRECTORY, RANK, WORDS, Texts, die, ended, final, masked, protect_trainer

RANKS, EPOCHS, STEPS, ACCUMULATE, BATCH = 2, 3, 6, 2, 4
TIMES = ("runtime", "per_second", "speed")


class Probe(transformers.TrainerCallback):  # type: ignore[misc]
    """Looks at each step, and dies where the plan says so."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        die(state.global_step + 1, "win")

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **of: Any) -> None:
        rates = [one["lr"] for one in optimizer.param_groups]
        ended(state.global_step, model.state_dict(), optimizer.state_dict()["state"], rates)

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


class Trainer(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, *of: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, *of, **more)
        die(self.state.global_step + (1 if model.training else 0), "fwd" if model.training else "evaluating")
        return loss


class Overrides(Trainer):
    def _inner_training_loop(self, *of: Any, **more: Any) -> Any:
        return super()._inner_training_loop(*of, **more)


def main() -> None:
    transformers.set_seed(7)
    config = transformers.GPT2Config(vocab_size=32, n_positions=WORDS, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    by_epoch = "epoch" in CASE
    arguments = transformers.TrainingArguments(
        str(DIRECTORY / "out"),
        num_train_epochs=EPOCHS,
        max_steps=9 if "stops" in CASE else -1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=2,
        eval_strategy="epoch" if by_epoch else "steps",
        eval_steps=3,
        save_strategy="epoch" if by_epoch else "steps",
        save_steps=3,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        dataloader_num_workers=2 if "workers" in CASE else 0,
        train_sampling_strategy="group_by_length" if "lengths" in CASE else "random",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = (Overrides if "overrides" in CASE else Trainer)(
        model,
        arguments,
        train_dataset=Texts(RANKS * STEPS * ACCUMULATE * BATCH),
        eval_dataset=Texts(16),
        data_collator=masked if "draws" in CASE else None,
        callbacks=[
            transformers.EarlyStoppingCallback(early_stopping_patience=3),
            *([LeavesEpochs()] if "leaves epochs" in CASE else []),
            Probe(),
        ],
    )
    protect_trainer(trainer)
    if "resumes by itself" in CASE:
        trainer.train(resume_from_checkpoint=True)
    done = trainer.train()
    if "twice" in CASE:
        trainer.train()
    log = [{k: v for k, v in one.items() if not any(t in k for t in TIMES)} for one in trainer.state.log_history]
    (DIRECTORY / f"log-{RANK}").write_text(
        json.dumps([log, done.training_loss, trainer.state.best_model_checkpoint is not None])
    )
    final(model.state_dict(), torch.get_rng_state())


if __name__ == "__main__":
    main()
