"""Transformers' `Trainer`: last words, resumed and healed, by one line after its constructor.

    trainer = Trainer(...)
    lastwords.integrations.hf.protect(trainer, "ckpt")
    trainer.train()

A step ends where its callbacks have been told so, before the Trainer logs, evaluates and saves; the next one begins
where its loader is asked for a batch again. What a death has cut off in between is done again in the resumed run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import transformers
import transformers.trainer as trainer_module
from accelerate import optimizer as accelerate_optimizer
from transformers import trainer_callback

import lastwords
from lastwords import AttributesOf, ConfigError
from lastwords.integrations import accelerate_data, holders, pins

VERSIONS = ">=5.24,<5.25"

PINNED = {
    "transformers.trainer:Trainer._inner_training_loop": "c89d74163f890146",
    "transformers.trainer:Trainer._init_training_state": "e5727cdc871c169c",
    "transformers.trainer:Trainer._run_epoch": "8a7e29af0fb38ea9",
    "transformers.trainer:Trainer._finalize_training": "971a3770c7818b94",
    "transformers.trainer:Trainer._maybe_log_save_evaluate": "44f1ba9bd692e20c",
    "transformers.trainer:Trainer._get_grad_norm": "e7ff4ef75fb70c91",
    "transformers.trainer:Trainer._get_learning_rate": "00ebcde49658d49e",
    "transformers.trainer:Trainer._load_rng_state": "c41ec46215457412",
    "transformers.trainer:Trainer.training_step": "047c647ce1c75e89",
    "transformers.trainer:Trainer.get_batch_samples": "51ec44b747e51869",
    "transformers.trainer:skip_first_batches": "fb4edc77ee5dcd9f",
    "transformers.trainer_callback:CallbackHandler": "f075619efc6c28df",
    "transformers.trainer_callback:ExportableState": "ea71af1c0749a148",
    "transformers.trainer_callback:ProgressCallback": "295212624b6f9ef1",
    "transformers.trainer_callback:TrainerState": "b0b02036c2627c2d",
    "transformers.trainer_callback:TrainerControl": "87ba225e77c29092",
}
"""What is replaced here, or read, and what lies around it."""

_protected: list[Any] = []

_TIMES = ("_runtime", "_per_second")
"""Ends of what a log has that no two runs have alike."""

_PLAIN = frozenset({type(None), bool, int, float, str})

_BY_RANK = ("is_local_process_zero", "is_world_process_zero", "log_history", "stateful_callbacks")
"""Of a TrainerState: kept apart, as it differs by rank, or not at all."""

_FIELDS = frozenset(one.name for one in dataclasses.fields(transformers.TrainerState))
"""Of any; callbacks may set more."""


def protect(
    trainer: transformers.Trainer,
    ckpt_save_path: str | os.PathLike[str],
    *,
    copy: bool | int | Literal["auto", "now"] = "auto",
) -> None:
    """Write last words of `trainer.train()` below ckpt_save_path, and go on from what is there. Call it on all ranks.

    A Trainer's own checkpoints stay as they are, and `resume_from_checkpoint` is refused. `train()` raises whatever
    `lastwords.protect` and `resume()` raise.

    Args:
        trainer: one that has not trained yet.
        ckpt_save_path: directory that all ranks see.
        copy: as for `TFTRegister`.

    Raises:
        ConfigError: a version or a layout that is not known.
    """
    pins.check("transformers", VERSIONS, PINNED)
    accelerate_data.check()
    _refuse_overridden(trainer)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError("lastwords protects a Trainer under DDP, or on one process; not under FSDP or DeepSpeed")
    if _protected:
        raise ConfigError("lastwords.integrations.hf.protect() was called before: a script has one Trainer that trains")
    _protected.append(trainer)
    trainer._lastwords = _Protected(trainer, ckpt_save_path, copy)


def is_protected(trainer: transformers.Trainer) -> bool:
    """Whether `protect` was called for it."""
    return isinstance(getattr(trainer, "_lastwords", None), _Protected)


def _refuse_overridden(trainer: Any) -> None:
    inner = ("_inner_training_loop", "_run_epoch", "_init_training_state", "_maybe_log_save_evaluate")
    own = [name for name in inner if getattr(type(trainer), name) is not getattr(transformers.Trainer, name)]
    if own:
        raise ConfigError(
            f"{type(trainer).__name__} overrides {', '.join(own)}, so lastwords cannot know where its steps end: "
            "call lastwords.protect() in its loop"
        )


class _OfAll:
    """What a Trainer counts, the same on all ranks: an extra. gradient_norm, rate: of the newest update, to log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.gradient_norm: float | None = None
        self.rate: float | None = None
        self._loaded: Mapping[str, Any] | None = None
        """What was saved, until a step has begun: the Trainer resets a part of it on the way there."""
        self.epoch_over = False
        """No step comes any more in the epoch of the newest one, be it that a callback has stopped it."""

    def step_begins(self) -> None:
        """From here on it is what the Trainer has."""
        self._loaded = None

    def state_dict(self) -> Mapping[str, Any]:
        if self._loaded is not None:
            return self._loaded
        trainer = self._trainer
        return {
            "state": {name: getattr(trainer.state, name) for name in _FIELDS.difference(_BY_RANK)},
            "callbacks": json.dumps([[type(one).__name__, one.state()] for one in self._stateful()]),
            "loss": trainer._total_loss_scalar,
            "logged": trainer._globalstep_last_logged,
            "first": trainer._initial_global_step,
            "gradient_norm": self.gradient_norm,
            "rate": self.rate,
            "epoch_over": self.epoch_over,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name, value in saved["state"].items():
            setattr(trainer.state, name, copy.deepcopy(value))
        left = [*self._stateful()]
        for name, state in json.loads(saved["callbacks"]):
            here = next((one for one in left if type(one).__name__ == name), None)
            if here is None:
                raise ConfigError(f"the saved run had a callback {name}, whose state has no place here: add it again")
            left.remove(here)
            for key, value in ({**state["args"], **state["attributes"]}).items():
                setattr(here, key, value)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = saved["loss"], saved["logged"]
        trainer._initial_global_step = saved["first"]
        self.gradient_norm, self.rate = saved["gradient_norm"], saved["rate"]
        self.epoch_over = saved["epoch_over"]
        self._loaded = {**saved}

    def _stateful(self) -> Iterator[Any]:
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return (one for one in callbacks if isinstance(one, trainer_callback.ExportableState))


class _OfRank:
    """What differs by rank: a local extra.

    A rank's own state is copied in the backward pass, before anything that lets another rank update: what the Trainer
    adds after it is counted here before.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loss: torch.Tensor | None = None
        """Of the batch in hand, until the Trainer has added it."""
        self._flos = 0.0
        self._logged, self._log, self._times = 0, "", ""
        self.odd: dict[str, Any] = {}
        """Of the log, what is no text: by its place, and key. A local extra of its own, after this one."""

    @contextmanager
    def batch(self, inputs: Any) -> Iterator[None]:
        """Inside, the Trainer trains on this one."""
        trainer = self._trainer
        self._flos = float(trainer.floating_point_ops(inputs))
        try:
            yield
        finally:
            self._loss, self._flos = None, 0.0

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of the batch in hand begins."""
        self._loss = loss.detach()

    def state_dict(self) -> dict[str, Any]:
        trainer, log = self._trainer, self._trainer.state.log_history
        if len(log) != self._logged:  # it only grows
            for place, whole in enumerate(log[self._logged :], self._logged):
                odd = {key: value for key, value in whole.items() if type(value) not in _PLAIN}
                one = {key: None if key in odd else value for key, value in whole.items()}
                self.odd.update({f"{place} {key}": value for key, value in odd.items()})
                times = {key: value for key, value in one.items() if key.endswith(_TIMES)}
                self._log += json.dumps({key: value for key, value in one.items() if key not in times}) + "\n"
                self._times += json.dumps(times) + "\n"
            self._logged = len(log)
        loss = trainer._tr_loss.clone()
        if self._loss is not None:
            counts = not trainer.args.logging_nan_inf_filter or bool(torch.isfinite(self._loss))
            since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            loss += self._loss if counts else loss / since  # as the Trainer does
        return {
            "loss": loss,
            "flos": float(trainer.current_flos) + self._flos,
            "log": self._log,
            "times": self._times,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer._tr_loss.copy_(saved["loss"])
        trainer.current_flos = saved["flos"]
        self._log, self._times = saved["log"], saved["times"]
        lines = zip(self._log.splitlines(), self._times.splitlines(), strict=True)
        trainer.state.log_history = [json.loads(line) | json.loads(times) for line, times in lines]
        self._logged = len(trainer.state.log_history)

    def resumed(self) -> None:
        """What is no text has come back, too."""
        for name, value in self.odd.items():
            place, _, key = name.partition(" ")
            self._trainer.state.log_history[int(place)][key] = value


_OF_ANY_TRAINER = holders.names_set_by(transformers.Trainer) | {"_lastwords", "callback_handler"}
"""Attributes that are no state, or kept as extras."""


_OF_THE_ADAPTOR = frozenset({"eval_on_start", "ignore_data_skip"})
"""Of the arguments, which callbacks may change: set here, for a part of the run."""


class _Protected(trainer_callback.TrainerCallback):
    """One `train()` of a Trainer; a callback of it, too."""

    def __init__(self, trainer: Any, path: str | os.PathLike[str], copy: bool | int | Literal["auto", "now"]) -> None:
        self._trainer, self._path, self._copy = trainer, path, copy
        self._tft: Any = None
        self._of_all, self._of_rank = _OfAll(trainer), _OfRank(trainer)
        self._ended = 0
        """The Trainer's number of the step that has ended last."""
        self._epoch, self._begun_at = 0, 0
        """The epoch under way, from 0, and the number of the step that came before it."""
        self._resumed: Any = None
        self._again = self._evaluates_first = False
        self._quiet = False
        """What a resumed run calls an epoch's start is none: what its callbacks have done then was saved."""
        ours = {
            "_inner_training_loop": self._inner_training_loop,
            "_init_training_state": self._init_training_state,
            "_run_epoch": self._run_epoch,
            "_finalize_training": self._finalize_training,
            "training_step": self._training_step,
            "_get_grad_norm": self._get_grad_norm,
            "_maybe_log_save_evaluate": self._log_save_evaluate,
        }
        self._plain = {name: getattr(trainer, name) for name in ours}
        for name, function in ours.items():
            setattr(trainer, name, function)
        self._plain["backward"], trainer.accelerator.backward = trainer.accelerator.backward, self._backward
        handler = trainer.callback_handler
        self._plain["call_event"], handler.call_event = handler.call_event, self._call_event
        trainer._load_rng_state = lambda checkpoint: None  # the streams come back where the loader is asked for a batch
        trainer.add_callback(self)

    # ------------------------------------------------------------------ in the Trainer's place

    def _inner_training_loop(self, *of: Any, **more: Any) -> Any:
        try:
            return self._plain["_inner_training_loop"](*of, **more)
        except BaseException as error:  # handed to the caller
            if self._tft is not None:
                self._tft.failed(error)
            raise

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """The Trainer's state, and where it goes on: epochs that are done, and batches of the next one."""
        trainer = self._trainer
        if self._tft is not None:
            raise ConfigError("train() was called before: lastwords protects one train() of a Trainer")
        if resume_from_checkpoint is not None:
            raise ConfigError(
                f"train(resume_from_checkpoint=) beside lastwords, which goes on from {self._path}: leave one out"
            )
        if trial is not None:
            raise ConfigError("lastwords does not protect a search for hyperparameters: protect one train()")
        callbacks = trainer.callback_handler.callbacks  # the last one: what others make as training begins is there
        callbacks.append(callbacks.pop(callbacks.index(self)))
        self._plain["_init_training_state"](max_steps, per_epoch, epochs, None, None)
        self._resumed = lastwords.peek(self._path, missing_ok=True, agreed=True)
        if self._resumed is None:
            return 0, 0
        trainer.state.global_step = self._resumed.global_step
        epoch, step = self._resumed.epoch, self._resumed.step
        if step >= per_epoch:
            return epoch, 0
        return epoch - 1, step * trainer.args.gradient_accumulation_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **of: Any) -> None:
        """All that is to be protected is there, and nothing has been drawn from the loader."""
        trainer, peeked = self._trainer, self._resumed
        self._data, scaler = accelerate_data.batches_of(train_dataloader), trainer.accelerator.scaler
        optimizer, model = trainer.optimizer, trainer.model_wrapped
        held = [*trainer.callback_handler.callbacks, trainer.compute_loss_func, trainer.compute_metrics]
        extras = {"scheduler": trainer.lr_scheduler, "trainer": self._of_all, **holders.modules_in(held, model)}
        own = {} if type(trainer) is transformers.Trainer else {"trainer": AttributesOf(trainer, _OF_ANY_TRAINER)}
        self._tft = lastwords.protect(
            self._path,
            model=model,
            optimizer=optimizer.optimizer,
            in_place=True,
            repeats=True,
            copy=self._copy,
            forget=["model*.training", *accelerate_data.set_in_each_epoch(train_dataloader)],  # they are set anew
            variables={
                **own,
                "args": AttributesOf(args, _OF_THE_ADAPTOR),
                "state": AttributesOf(state, _FIELDS),
                **holders.objects_in(held, model),
            },
            extras={**extras, "scaler": scaler} if scaler is not None else extras,
            local_extras={"trainer": self._of_rank, "data": self._data, "log": self._of_rank.odd},
        )
        if scaler is not None:  # it has kept the optimizer's own step
            step = optimizer._optimizer_original_step_method = optimizer.optimizer.step
            optimizer._optimizer_patched_step_method = accelerate_optimizer.patch_optimizer_step(optimizer, step)
        self._tft.start()
        point = self._tft.resume(missing_ok=True)
        if (0 if point is None else point.global_step) != (0 if peeked is None else peeked.global_step):
            raise ConfigError(f"another checkpoint has come to {self._path} while training began: start again")
        self._of_rank.resumed()
        self._ended = 0 if point is None else point.global_step
        self._again = point is not None and not point.begun
        self._quiet = point is not None
        self._epoch_stops, self._training_stops = control.should_epoch_stop, control.should_training_stop
        self._evaluates_first, args.eval_on_start = args.eval_on_start, args.eval_on_start and point is None
        for one in trainer.callback_handler.callbacks:
            if isinstance(one, trainer_callback.ProgressCallback) and (bar := one.training_bar) is not None:
                one.current_step = bar.initial = bar.last_print_n = bar.n = state.global_step
                bar.refresh()

    def _call_event(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        if event == "on_epoch_begin" and self._quiet:
            return control
        return self._plain["call_event"](event, args, state, control, **more)

    def _do_again(self, start_time: float, *, begins_epoch: bool = False) -> None:
        """What comes between the step's end and the next one's start, if it was cut off, with what it had drawn."""
        trainer, of_all, state = self._trainer, self._of_all, self._trainer.state
        trainer.args.eval_on_start = self._evaluates_first
        if not self._again:
            return
        self._again = False
        norm = None if of_all.gradient_norm is None else torch.tensor(of_all.gradient_norm)
        self._tft.step_begin()
        epoch = self._resumed.epoch - 1

        def log_save_evaluate() -> None:
            self._plain["_maybe_log_save_evaluate"](
                trainer._tr_loss,
                norm,
                trainer.model_wrapped,
                None,
                epoch,
                None,
                start_time,
                learning_rate=of_all.rate,
            )

        trainer.control.should_epoch_stop = self._epoch_stops  # not as of an epoch that begins: checkpoints have it
        log_save_evaluate()
        if state.epoch == int(state.epoch) or self._epoch_stops or self._training_stops or self._data.at_end:
            self._of_all.epoch_over = True
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, state, trainer.control)
            log_save_evaluate()
            self._quiet = False
            if begins_epoch and not trainer.control.should_training_stop:
                trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, state, trainer.control)

    def _run_epoch(self, *, epoch: int, epochs_trained: int, **more: Any) -> None:
        trainer = self._trainer
        resumed = self._resumed is not None and epoch == epochs_trained
        self._do_again(more["start_time"], begins_epoch=resumed and self._resumed.epoch <= epoch)
        self._epoch, self._begun_at = epoch, self._ended
        if resumed and self._resumed.epoch == epoch + 1:
            self._begun_at -= self._resumed.step
            if self._of_all.epoch_over:  # a callback had stopped it
                self._data.end_epoch()
                return
        if trainer.control.should_training_stop:  # the saved run was about to
            return
        more["resume_from_checkpoint"] = str(self._path) if resumed else None
        with _no_batch_skipped(trainer.args) if resumed else nullcontext():
            self._plain["_run_epoch"](epoch=epoch, epochs_trained=epochs_trained, **more)

    def _finalize_training(self, trial: Any, samples: Any, start_time: float) -> Any:
        """The loop is over."""
        self._do_again(start_time)
        self._tft.stop()
        return self._plain["_finalize_training"](trial, samples, start_time)

    def _get_grad_norm(self, *of: Any, **more: Any) -> Any:
        """Right before the update."""
        norm, of_all = self._plain["_get_grad_norm"](*of, **more), self._of_all
        of_all.gradient_norm = None if norm is None else float(norm)
        of_all.rate = self._trainer._get_learning_rate()
        return norm

    def _training_step(self, model: Any, inputs: Any, *of: Any, **more: Any) -> Any:
        self._quiet = False
        self._of_all.step_begins()
        self._tft.step_begin(self._epoch + 1, self._ended + 1 - self._begun_at)
        with self._of_rank.batch(inputs):
            return self._plain["training_step"](model, inputs, *of, **more)

    def _backward(self, loss: Any, **more: Any) -> None:
        self._of_rank.backward(loss)
        self._plain["backward"](loss, **more)

    def _log_save_evaluate(self, *of: Any, **more: Any) -> None:
        """A step is over, and perhaps an epoch after it."""
        trainer = self._trainer
        step = trainer.state.global_step
        self._of_all.epoch_over = epoch_over = step == self._ended
        if not epoch_over:
            self._ended = step
            self._tft.step_end(self._epoch + 1, step - self._begun_at)
        control = trainer.control
        together = epoch_over or control.should_log or control.should_evaluate or control.should_save
        self._plain["_maybe_log_save_evaluate"](*of, **more)
        if together:  # no rank begins the next step before all are done with this, or it could not be done again
            trainer.accelerator.wait_for_everyone()


@contextmanager
def _no_batch_skipped(args: Any) -> Iterator[None]:
    """The loader begins after what was used by itself; the Trainer has to count those batches, and not to skip them."""
    plain, was = trainer_module.skip_first_batches, args.ignore_data_skip

    def skip_none(loader: Any, count: int) -> Any:
        args.ignore_data_skip = was  # callbacks see it, and checkpoints have it
        return loader

    trainer_module.skip_first_batches, args.ignore_data_skip = skip_none, False
    try:
        yield
    finally:
        trainer_module.skip_first_batches, args.ignore_data_skip = plain, was
