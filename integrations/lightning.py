"""Lightning's `Trainer`: last words, resumed and healed, by one callback.

    Trainer(..., callbacks=[lastwords.integrations.lightning.LastWords("ckpt")]).fit(module)

A step ends once all hooks of its last batch have been called, before Lightning validates; the next one begins where its
loader is asked for a batch again. What a death has cut off in between is done again in the resumed run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch.utils.data import DataLoader, Dataset, Sampler

import lastwords
from lastwords import AttributesOf, Batches, ConfigError
from lastwords.integrations import holders, pins

_log = logging.getLogger(__name__)

VERSIONS = ">=2.6.6,<2.7"

PINNED = {
    "lightning.pytorch.loops.fit_loop:_FitLoop": "f07c28d24d3bd8e4",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop": "243ada00afae13ee",
    "lightning.pytorch.loops.loop:_Loop": "306f2256e345db5a",
    "lightning.pytorch.loops.fetchers:_PrefetchDataFetcher": "36213fae6249d788",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric": "c28782aebb05b44c",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection": "0139dd5a1ec24bf9",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector": "57ce17320b267b8e",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_Metadata": "e6f42c60874a4509",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_Sync": "177141b291e3b721",
    "lightning.pytorch.callbacks:WeightAveraging": "",
    "lightning.pytorch.callbacks:ModelCheckpoint.file_exists": "56a3de2249c9e6b8",
    "lightning.pytorch.trainer.trainer:Trainer._run": "0c82665b1b1d66f0",
    "lightning.pytorch.trainer.trainer:Trainer._run_stage": "08364f5efc0152e6",
}
"""What is replaced here, or read, and what lies around it."""

_METRICS = {"pbar": "_progress_bar_metrics", "log": "_logged_metrics", "callback": "_callback_metrics"}

_WHEN_RESET = ("_first_loop_iter", "_current_fx")
"""Where averages begin anew."""

_SAVED = ("_last_checkpoint_saved", "_last_global_step_saved", "_defer_save_until_validation")
"""Of a ModelCheckpoint, and not in its state: whether the step, or anything, has been saved already, or is due."""

_REBUILDS = ("StochasticWeightAveraging", "ModelPruning", "BatchSizeFinder", "LearningRateFinder")
"""Callbacks that put other schedulers, parameters or loaders in place while a Trainer trains, or before."""

_protected: list[pl.Trainer] = []


class _Loops:
    """What Lightning's loops count, the same on every rank: an extra."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer: Any = trainer
        self._loaded: Mapping[str, Any] | None = None
        """What was saved, until a step has begun: the Trainer resets a part of it on the way there."""

    def epoch_begins(self) -> None:
        """A resumed one tells nobody that it starts: GradientAccumulationScheduler sets this then."""
        if self._loaded is not None:
            self._trainer.accumulate_grad_batches = self._loaded["accumulate"]

    def step_begins(self) -> None:
        """From here on it is what the Trainer has."""
        self._loaded = None

    def state_dict(self) -> Mapping[str, Any]:
        if self._loaded is not None:
            return self._loaded
        state = self._trainer.fit_loop.state_dict()
        state["state_dict"].pop("combined_loader", None)  # where the loader stands is kept beside it
        connector = self._trainer._logger_connector
        return {
            "loops": state,
            "should_stop": self._trainer.should_stop,
            "accumulate": self._trainer.accumulate_grad_batches,
            "logging": {name: getattr(connector, name) for name in _WHEN_RESET},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(saved["loops"])
        self._trainer.should_stop = saved["should_stop"]
        vars(self._trainer._logger_connector).update(saved["logging"])
        self._loaded = {**saved}


class _Callbacks:
    """State of these callbacks, of those that have any: an extra.

    derived: those whose directory Lightning has chosen, by the logger's version, which is another one in each run.
    """

    def __init__(self, callbacks: list[Any], derived: list[Any] | None = None) -> None:
        self._callbacks, self._derived = callbacks, derived or []

    def state_dict(self) -> dict[str, Any]:
        found = {one.state_key: one.state_dict() for one in self._callbacks}
        for one in self._callbacks:
            if isinstance(one, pl.callbacks.ModelCheckpoint):
                found[one.state_key] |= {name: getattr(one, name) for name in _SAVED}
        return {key: state for key, state in found.items() if state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for one in self._callbacks:
            if one.state_key in saved:
                state = saved[one.state_key]
                if any(one is other for other in self._derived) and state.get("dirpath"):
                    one.dirpath = state["dirpath"]  # in another one ModelCheckpoint forgets the best models
                    os.makedirs(one.dirpath, exist_ok=True)
                one.load_state_dict(state)
                now = one.state_dict()
                for name in state.keys() & vars(one).keys():  # ModelCheckpoint leaves its newest score out, and _SAVED
                    if now.get(name) is None and state[name] is not None:
                        vars(one)[name] = state[name]


class _OwnTimers(_Callbacks):
    """How long each (`max_time`) has been training on this rank when the newest batch came: a local extra."""

    def __init__(self, callbacks: list[Any]) -> None:
        super().__init__(callbacks)
        self.read()

    def read(self) -> None:
        """The time now. Between two calls the state stays as it is."""
        self._newest = super().state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._newest

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self._newest = {**saved}


class _Metrics:
    """What has been logged, and what is being averaged over the epoch, on this rank: a local extra."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer: Any = trainer
        self._connector: Any = trainer._logger_connector
        self._results: Any = trainer.fit_loop.epoch_loop._results

    def state_dict(self) -> dict[str, Any]:
        averaged = {key: _taken_apart(one) for key, one in self._results.items() if one.is_tensor and not one.has_reset}
        # A rank's own state is copied in the backward pass: with what Lightning takes over at the end of the batch.
        newest = self._results.metrics(on_step=True)
        logged = {name: {**getattr(self._connector, name), **newest[kind]} for kind, name in _METRICS.items()}
        return {"averaged": averaged, **logged}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for key, one in saved["averaged"].items():
            meta = result._Metadata(**one["meta"])
            meta.sync = result._Sync(fn=self._trainer.strategy.reduce, **one["sync"])
            self._results[key] = metric = result._ResultMetric(meta, is_tensor=True)
            vars(metric).update(one["values"])
        for name in _METRICS.values():
            setattr(self._connector, name, {**saved[name]})


def _taken_apart(metric: Any) -> dict[str, Any]:
    meta, own = metric.meta, vars(metric)
    fields = {one.name: getattr(meta, one.name) for one in dataclasses.fields(meta) if one.name != "_sync"}
    return {
        "meta": {**fields, "reduce_fx": meta.reduce_fx.__name__},
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "values": {name: own[name] for name in ("value", "cumulated_batch_size", "_update_count") if name in own},
    }


class LastWords(pl.Callback):
    """Writes last words of `fit()` below ckpt_save_path, and goes on from what is there.

    Lightning's own checkpoints stay as they are, and `ckpt_path=` is refused. `fit()` raises whatever
    `lastwords.protect` and `resume()` raise.

    Args:
        ckpt_save_path: directory that all ranks see.
        copy: as for `TFTRegister`.

    Raises:
        ConfigError: a version, a strategy or a loader that is not known.
    """

    def __init__(
        self, ckpt_save_path: str | os.PathLike[str], *, copy: bool | int | Literal["auto", "now"] = "auto"
    ) -> None:
        pins.check(pl.__name__.partition(".")[0], VERSIONS, PINNED)
        self._path, self._copy = ckpt_save_path, copy
        self._tft: Any = None
        self._trainer: Any = None
        self._states: Any = None
        """What Lightning calls once the loader is there."""
        self._data = Batches()
        self._stepped = 0
        """The Trainer's count of updates at the end of the newest step."""
        self._again = False
        """What comes between two steps was cut off, and is due."""
        self._together = False
        """All ranks have to be done with what comes between two steps."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Optimizers come next, and may ask how many batches there are (`estimated_stepping_batches`)."""
        if not isinstance(trainer, pl.Trainer):
            raise ConfigError(
                f"{__name__}.LastWords is for a Trainer of {pl.__name__}, and this one is of "
                f"{type(trainer).__module__.partition('.')[0]}: lastwords.integrations.lightning and "
                "lastwords.integrations.pytorch_lightning have a LastWords each"
            )
        if stage == "fit":
            _refuse_callbacks(trainer)  # here, as a search for a rate or a size is done before the others' on_fit_start
            fit: Any = trainer.fit_loop
            if fit._combined_loader is not None:
                raise ConfigError(
                    "the training loader was set up before the callbacks were, so lastwords does not know where it "
                    "stands: leave out fit_loop.setup_data()"
                )
            self._trainer, self._states = trainer, fit._load_combined_loader_states
            fit._load_combined_loader_states = self._loader_is_there

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Model and optimizers are there, and no batch was taken from the loader."""
        _refuse(trainer, bool(_protected))
        _protected.append(trainer)
        strategy: Any = trainer.strategy
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        schedulers = {f"scheduler {place}": one.scheduler for place, one in enumerate(strategy.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        held: list[Any] = [one for one in trainer.callbacks if one is not self]
        timers = [one for one in held if isinstance(one, pl.callbacks.Timer)]
        self._loops, self._timers = _Loops(trainer), _OwnTimers(timers)
        self._savers = [one for one in held if isinstance(one, pl.callbacks.ModelCheckpoint)]
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        of_data = {} if data is None else {type(data).__name__: AttributesOf(data, _not_counted(data))}
        self._tft = lastwords.protect(
            self._path,
            model=strategy.model,
            optimizer=strategy.optimizers,
            in_place=True,
            repeats=True,
            copy=self._copy,
            extras={
                "loops": self._loops,
                "callbacks": _Callbacks([one for one in held if one not in timers], _derived(trainer)),
                **schedulers,
                **holders.modules_in(held, strategy.model),
                **({} if scaler is None else {"scaler": scaler}),
            },
            local_extras={"metrics": _Metrics(trainer), "data": self._data, "timers": self._timers},
            variables={**of_data, **holders.objects_in(held, strategy.model)},
            forget=["model*.training", "model*._current_fx_name"],  # Lightning sets them in each step
        )
        self._tft.start()
        point = self._tft.resume(missing_ok=True)
        self._stepped, self._again = trainer.global_step, point is not None and not point.begun
        for one in self._savers if self._again else ():
            vars(one)["file_exists"] = partial(_is_kept, one)
        self._plain = {
            "reset": epoch.reset,
            "on_run_start": epoch.on_run_start,
            "batch_over": epoch.on_advance_end,
            "epoch_over": fit.on_advance_end,
        }
        epoch.reset, epoch.on_run_start = self._epoch_resets, self._epoch_begins
        epoch.on_advance_end = self._batch_over
        fit.on_advance_end = self._epoch_over
        if self._data.loader is not None:
            self._data.known()

    # ------------------------------------------------------------------ in the loops' place

    def _loader_is_there(self) -> None:
        """Before it is iterated over for the first time."""
        trainer = self._trainer
        loaders = trainer.fit_loop._combined_loader.flattened
        if len(loaders) != 1:
            raise ConfigError(f"lastwords knows where one training loader stands, and there are {len(loaders)}")
        self._states()
        self._data.ahead = trainer.fit_loop._combined_loader.limits[0] == float("inf")
        if self._data.ahead and self._tft is None:
            raise ConfigError(
                "configure_optimizers() asks for trainer.estimated_stepping_batches, so Lightning takes the first "
                "batch of a loader without a length before anything is resumed: say max_epochs=-1, or ask for "
                "trainer.max_steps, which is its answer for such a loader"
            )
        self._data.stand_in(loaders[0])
        self._data.over = self._again and self._data.at_end  # without a length, a first batch is fetched at once

    def _epoch_resets(self) -> None:
        """`on_train_epoch_start` was called, and no batch of the epoch was fetched."""
        self._together = True
        self._wait_for_all()
        self._loops.epoch_begins()
        epoch = self._trainer.fit_loop.epoch_loop
        stepped = epoch._batches_that_stepped
        with warnings.catch_warnings():  # Lightning does not know that the loader goes on where it was
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            self._plain["reset"]()
        epoch._batches_that_stepped = stepped  # of Lightning's own checkpoints it is one short

    def _epoch_begins(self, data_fetcher: Any) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        self._plain["on_run_start"](data_fetcher)
        if fit.restarting:
            # What was saved is where its loops go on as they are. `fit.restarting = False` does nothing where steps
            # are counted alone (max_steps): after an epoch's end all further epochs would be empty.
            fit._restarting = fit.epoch_loop.restarting = False
            trainer.val_dataloaders  # noqa: B018  # made before they are asked for
            if fit.restarted_mid_epoch and trainer.progress_bar_callback is not None:  # nobody has told it
                trainer.progress_bar_callback.on_train_epoch_start(trainer, trainer.lightning_module)
        if self._again:
            self._again = False
            self._tft.step_begin()
            self._plain["batch_over"](data_fetcher)
            self._wait_for_all()

    def _batch_over(self, data_fetcher: Any) -> None:
        """All hooks of a batch have been called; if an update was made in it, a step is over."""
        trainer = self._trainer
        if trainer.global_step > self._stepped:
            self._stepped = trainer.global_step
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._tft.step_end(trainer.current_epoch + 1, -(-batches // trainer.accumulate_grad_batches))
        self._plain["batch_over"](data_fetcher)
        self._wait_for_all()

    def _epoch_over(self) -> None:
        self._plain["epoch_over"]()
        self._together = True
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """No rank begins the next step before all are done, or what comes between two could not be done again."""
        if self._together:
            self._together = False
            self._trainer.strategy.barrier("lastwords")

    # ------------------------------------------------------------------ hooks

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        self._loops.step_begins()
        self._timers.read()
        for one in self._savers:
            vars(one).pop("file_exists", None)
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # the loader may have more (limit_train_batches)
            self._data.end_epoch()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._together = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._tft is not None:
            self._tft.failed(exception)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tft.stop()


def _derived(trainer: Any) -> list[Any]:
    """ModelCheckpoints that write where Lightning puts them if nobody says where."""
    if not trainer.loggers:
        return []
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    save_dir = trainer.default_root_dir if logger.save_dir is None else logger.save_dir
    default = os.path.join(save_dir, str(logger.name), version, "checkpoints")
    savers = [one for one in trainer.callbacks if isinstance(one, pl.callbacks.ModelCheckpoint)]
    return [one for one in savers if str(one.dirpath) == default]


def _is_kept(saver: Any, path: str, trainer: Any) -> bool:
    """Whether another file may not be written there. That of a save that was cut off may: its name is due again."""
    if not type(saver).file_exists(saver, path, trainer):
        return False
    known = [*saver.best_k_models, saver.best_model_path, saver.last_model_path]
    cut_off = trainer.is_global_zero and path not in known and _has_these_weights(path, trainer)
    return not trainer.strategy.reduce_boolean_decision(cut_off, all=False)


def _has_these_weights(path: str, trainer: Any) -> bool:
    now = trainer.lightning_module.state_dict()
    try:
        saved = trainer.strategy.load_checkpoint(path, weights_only=True)
        step, weights = saved["global_step"], saved["state_dict"]
        same = all(torch.equal(value, now[name].to(value.device)) for name, value in weights.items())
    except Exception as error:  # of a file that nobody has foreseen: handed to the log, and it is kept
        _log.debug("%s is kept: %s", path, error)
        return False
    return bool(step == trainer.global_step and weights.keys() == now.keys() and same)


def _not_counted(data: Any) -> set[str]:
    """Attributes of a data module that hold what its loaders have, or what any has."""
    own = {name for name, one in vars(data).items() if isinstance(one, Dataset | DataLoader | Sampler)}
    return own | holders.names_set_by(pl.LightningDataModule)


def _refuse_callbacks(trainer: Any) -> None:
    """ConfigError for those that are not known."""
    rebuild = tuple(getattr(pl.callbacks, name) for name in _REBUILDS)
    strange = [type(one).__name__ for one in trainer.callbacks if isinstance(one, rebuild)]
    if strange:
        raise ConfigError(
            f"{', '.join(strange)} puts other schedulers, parameters or loaders in place while the Trainer trains, "
            "which lastwords cannot follow: leave it out, or call lastwords.protect() in a loop of your own"
        )
    if sum(isinstance(one, LastWords) for one in trainer.callbacks) > 1:
        raise ConfigError("this Trainer has two LastWords: leave one of them out")


def _refuse(trainer: pl.Trainer, again: bool) -> None:
    """ConfigError for what is not known."""
    if again:
        raise ConfigError("fit() was called before: lastwords protects one fit() in a script")
    if not isinstance(trainer.strategy, pl.strategies.DDPStrategy | pl.strategies.SingleDeviceStrategy):
        raise ConfigError(
            f"lastwords protects a Trainer with strategy 'ddp', or on one device, and this one has a "
            f"{type(trainer.strategy).__name__}: call lastwords.protect() in a loop of your own"
        )
    averages = any(isinstance(one, pl.callbacks.WeightAveraging) for one in trainer.callbacks)  # type: ignore[attr-defined]
    if averages and trainer.world_size > 1 and any(True for _ in trainer.lightning_module.buffers()):
        raise ConfigError(
            "WeightAveraging swaps a model and its average for a validation, and lastwords cannot follow buffers that "
            "differ by rank there: use layers without (a LayerNorm), or call lastwords.protect() in a loop of your own"
        )
    if trainer.ckpt_path is not None:
        raise ConfigError("fit(ckpt_path=) beside lastwords, which goes on from what it has saved: leave one out")
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError("lastwords does not know where a loader stands with reload_dataloaders_every_n_epochs=")
