"""Training with a Trainer of transformers or lightning, or with accelerate or Fabric, as scripts have it.

Arguments: a directory, the number of steps, and deaths as rank:step:phase that happen once: fwd; win, after the update;
in a loop without a Trainer also evaluating and saving, before that step. FRAMEWORK is a key of SCRIPTS, and LEFT_OUT
names what a script forgets. Each rank adds a line per step to {directory}/trace-{rank}: its number, a digest of
weights, optimizer and learning rate, and the pid. final-{rank} is the digest of all at the end, random numbers
included; resumed-{rank} has what resume() has returned.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lastwords
from tests.frameworks.script import digest, masked

DIRECTORY, DEATHS = Path(sys.argv[1]), sys.argv[3:]
FRAMEWORK, LEFT_OUT, RANK = os.environ["FRAMEWORK"], os.environ.get("LEFT_OUT"), int(os.environ["RANK"])
RANKS, EPOCHS, STEPS, ACCUMULATE, BATCH, WORDS = 2, 3, 6, 2, 4, 12
CHECKPOINTS = DIRECTORY / "ckpt"


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Of WORDS words each, of a language of 32."""

    texts = torch.randint(
        0, 32, (RANKS * STEPS * ACCUMULATE * BATCH, WORDS), generator=torch.Generator().manual_seed(3)
    )

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


class Net(nn.Module):
    """What predicts each word from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(32, 16), nn.Dropout(0.2), nn.Linear(16, 32))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(input_ids)
        return scores.transpose(1, 2)


class Job:
    """What the test sees of a run, whoever trains."""

    def __init__(self) -> None:
        self.done = 0
        self.tft: Any = None
        self.state: Callable[[], list[Any]]

    def protect(self, model: nn.Module, optimizer: Any, scheduler: Any, data: Any = None, **more: Any) -> Any:
        """All that a script has to do before its loop; returns what is resumed. data: a local extra."""
        rates = optimizer.param_groups
        self.state = lambda: [model.state_dict(), optimizer.state_dict()["state"], [one["lr"] for one in rates]]
        extras = {"scheduler": scheduler, **more} if LEFT_OUT != "scheduler" else more
        forget = ["model._current_fx_name"]  # of lightning: which hook is running
        of_rank = {"data": data} if data is not None else None
        self.tft = lastwords.protect(
            CHECKPOINTS, model=model, optimizer=optimizer, extras=extras, local_extras=of_rank, forget=forget
        )
        self.tft.start()
        point = self.tft.resume(missing_ok=True)
        if point is not None:
            self.done = point.global_step
            with (DIRECTORY / f"resumed-{RANK}").open("a") as file:
                file.write(f"{point.exact} {point.reasons}\n")
        return point

    def die(self, phase: str) -> None:
        """Here, in the step that is next, if the plan says so; in a forward pass once all ranks have come to it."""
        at = f"{self.done + 1}:{phase}"
        for death in DEATHS:
            mark = DIRECTORY / f"died-{death.replace(':', '-')}"
            if death.endswith(f":{at}") and not mark.exists():
                if phase == "fwd":
                    dist.barrier()
                if death == f"{RANK}:{at}":
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

    def step_begin(self) -> None:
        if LEFT_OUT != "step_begin":
            self.tft.step_begin()

    def step_end(self, step: int) -> None:
        """step: as the framework counts, which has to go on where the saved run was."""
        self.tft.step_end(1 + (step - 1) // STEPS, 1 + (step - 1) % STEPS)
        self.done = step
        with (DIRECTORY / f"trace-{RANK}").open("a") as file:
            file.write(f"{step} {digest(self.state())} {os.getpid()}\n")

    def stop(self) -> None:
        self.tft.stop()
        (DIRECTORY / f"final-{RANK}").write_text(digest([*self.state(), torch.get_rng_state()]))


# ---------------------------------------------------------------------- transformers


def transformers_trainer(looks_ahead: bool = True, collate: Any = None) -> None:
    import transformers

    job = Job()

    class Protected(transformers.TrainerCallback):  # type: ignore[misc]
        """What a script has to add."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            job.protect(trainer.model_wrapped, wrapped, of["lr_scheduler"])

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            if not looks_ahead:
                trainer.sampler.set_epoch(state.global_step // STEPS)

        def on_step_begin(self, *_: Any, **of: Any) -> None:
            if looks_ahead:
                job.step_begin()

        def on_optimizer_step(self, *_: Any, **of: Any) -> None:
            job.die("win")

        def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            job.step_end(state.global_step)

        def on_train_end(self, *_: Any, **of: Any) -> None:
            job.stop()

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        sampler: Any

        def get_train_dataloader(self) -> Any:
            """Accelerate's fetches a batch before the one before is trained on; this one does not."""
            if looks_ahead:
                return super().get_train_dataloader()
            self.sampler = DistributedSampler(self.train_dataset, RANKS, RANK)
            return DataLoader(self.train_dataset, BATCH, sampler=self.sampler, collate_fn=self.data_collator)

        def get_batch_samples(self, *of: Any) -> Any:
            if not looks_ahead:
                job.step_begin()
            return super().get_batch_samples(*of)

        def compute_loss(self, *of: Any, **more: Any) -> Any:
            loss = super().compute_loss(*of, **more)
            job.die("fwd")
            return loss

    transformers.set_seed(7)
    config = transformers.GPT2Config(vocab_size=32, n_positions=WORDS, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    wrapped = lastwords.OptTFTWrapper(torch.optim.AdamW(model.parameters(), 1e-2))
    arguments = transformers.TrainingArguments(
        str(DIRECTORY / "out"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    more: dict[str, Any] = {"data_collator": collate} if collate else {}
    trainer = Trainer(
        model, arguments, train_dataset=Texts(), optimizers=(wrapped, None), callbacks=[Protected()], **more
    )
    point = lastwords.peek(CHECKPOINTS, missing_ok=True)
    if point is None:
        trainer.train()
        return
    # A checkpoint of the Trainer's, for the position: weights and all else are those of resume().
    at = DIRECTORY / f"position-{RANK}"
    at.mkdir(exist_ok=True)
    torch.save(model.state_dict(), at / "pytorch_model.bin")
    state = transformers.TrainerState(global_step=point.global_step, train_batch_size=BATCH)
    state.save_to_json(str(at / "trainer_state.json"))
    trainer.train(resume_from_checkpoint=str(at) if LEFT_OUT != "position" else None)


# ---------------------------------------------------------------------- lightning


class Onward(DistributedSampler[Any]):
    """The first epoch of this process begins after so many samples."""

    skipped = 0

    def __iter__(self) -> Iterator[Any]:
        order, self.skipped = [*super().__iter__()][self.skipped :], 0
        return iter(order)


class Counters:
    """Those of the Trainer's loops, of the end of a batch: Lightning goes on from there, and not from every moment."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.kept = loop, loop.state_dict()

    def keep(self) -> None:
        self.kept = copy.deepcopy(self.loop.state_dict())

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state
        self.loop.load_state_dict(state)


def lightning_trainer(collate: Any = None) -> None:
    import lightning.pytorch as pl

    job = Job()

    class Protected(pl.Callback):  # type: ignore[misc]
        """What a script has to add."""

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            (scheduled,), strategy = trainer.lr_scheduler_configs, trainer.strategy
            self.counters = Counters(trainer.fit_loop)
            job.protect(strategy.model, strategy.optimizers[0], scheduled.scheduler, counters=self.counters)
            sampler.skipped = job.done % STEPS * ACCUMULATE * BATCH

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            job.step_begin()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > job.done:
                job.die("win")
                self.counters.keep()
                job.step_end(trainer.global_step)

        def on_train_epoch_end(self, *_: Any) -> None:
            self.counters.keep()

        def on_train_end(self, *_: Any) -> None:
            job.stop()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch["input_ids"]), batch["labels"])
            job.die("fwd")
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = lastwords.OptTFTWrapper(torch.optim.AdamW(self.parameters(), 1e-2))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    pl.seed_everything(7)
    sampler = Onward(Texts(), RANKS, RANK)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        use_distributed_sampler=False,
        default_root_dir=DIRECTORY,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Protected()],
    )
    trainer.fit(Module(), DataLoader(Texts(), BATCH, sampler=sampler, collate_fn=collate))


# ---------------------------------------------------------------------- accelerate


def evaluate(job: Job, model: nn.Module, save: Callable[[], None]) -> None:
    """After each third step, with a checkpoint of the framework's own."""
    if job.done % 3 == 0:
        model.eval()
        with torch.no_grad():
            model(Texts.texts[:BATCH])
        job.die("evaluating")
        model.train()
        save()


def accelerate_loop(collate: Any = None) -> None:
    import accelerate

    from lastwords.integrations.accelerate_data import batches_of

    job = Job()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    accelerate.utils.set_seed(7)
    accelerator.register_save_state_pre_hook(lambda models, weights, directory: job.die("saving"))
    net = Net()
    optimizer = lastwords.OptTFTWrapper(torch.optim.AdamW(net.parameters(), 1e-2))
    loader: Any = DataLoader(Texts(), BATCH, shuffle=True, collate_fn=collate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    model, its_optimizer, loader = accelerator.prepare(net, optimizer, loader)
    torch.manual_seed(5 + RANK)
    job.protect(model, optimizer, schedule, batches_of(loader) if collate and LEFT_OUT != "batches" else None)
    for *_, batch in job.tft.steps(loader, EPOCHS, accumulate=ACCUMULATE):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
            job.die("fwd")
            accelerator.backward(loss)
            its_optimizer.step()
            its_optimizer.zero_grad()
        if job.tft.ends_step:
            job.die("win")
            schedule.step()
            job.step_end(job.done + 1)
            evaluate(job, model, lambda: accelerator.save_state(str(DIRECTORY / "accelerate")))
    job.stop()


# ---------------------------------------------------------------------- fabric


class Dies:
    """A part of what Fabric saves."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> dict[str, int]:
        self.job.die("saving")
        return {"done": self.job.done}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def fabric_loop(collate: Any = None) -> None:
    from lightning.fabric import Fabric

    job = Job()
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7)
    net = Net()
    optimizer = lastwords.OptTFTWrapper(torch.optim.AdamW(net.parameters(), 1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    model, its_optimizer = fabric.setup(net, optimizer)
    loader: Any = fabric.setup_dataloaders(DataLoader(Texts(), BATCH, shuffle=True, collate_fn=collate))
    torch.manual_seed(5 + RANK)
    job.protect(model, optimizer, schedule)
    for *_, batch in job.tft.steps(loader, EPOCHS, accumulate=ACCUMULATE):
        with fabric.no_backward_sync(model, enabled=not job.tft.ends_step):
            loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
            job.die("fwd")
            fabric.backward(loss)
        if job.tft.ends_step:
            its_optimizer.step()
            its_optimizer.zero_grad()
            job.die("win")
            schedule.step()
            job.step_end(job.done + 1)
            evaluate(job, model, lambda: fabric.save(DIRECTORY / "fabric.ckpt", {"net": model, "dies": Dies(job)}))
    job.stop()


SCRIPTS: dict[str, Callable[[], None]] = {
    "transformers": transformers_trainer,
    "transformers, a collator that draws": lambda: transformers_trainer(looks_ahead=False, collate=masked),
    "transformers, a batch ahead": lambda: transformers_trainer(collate=masked),
    "lightning": lightning_trainer,
    "lightning, a collator that draws": lambda: lightning_trainer(masked),
    "accelerate": accelerate_loop,
    "accelerate, a collator that draws": lambda: accelerate_loop(masked),
    "fabric": fabric_loop,
    "fabric, a collator that draws": lambda: fabric_loop(masked),
}

if __name__ == "__main__":
    SCRIPTS[FRAMEWORK]()
