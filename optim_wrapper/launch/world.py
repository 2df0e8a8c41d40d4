"""Which rank this is, and how the ranks of a job agree on a few strings before the controller exists."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lastwords.checkpoint.starts import Launch
from lastwords.clock import mono_s
from lastwords.errors import ConfigError, LastWordsError, UnavailableError
from lastwords.liveness.process_id import host_id, start_ticks
from lastwords.torch_private import Store, default_store

_Constructor = TypeVar("_Constructor", bound=Callable[..., Any])

_FIRST_LOOK_S = 0.0005
_LOOK_S = 0.5
"""A rank that waits for another's word looks for it in pauses that grow from the first to this."""

_REFUSED = "/refused"

_agreements = 0


class World:
    """Rank, size and the process group's store; a job of one needs no process group."""

    def __init__(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self.store: Store | None = _default_store()
            self.backend = str(dist.get_backend())
            return
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size != 1:
            raise ConfigError(
                f"WORLD_SIZE is {size}, but torch.distributed is not initialised; "
                "call torch.distributed.init_process_group() first"
            )
        self.rank, self.size, self.store, self.backend = 0, 1, None, "none"

    def publish(self, key: str, value: dict[str, Any]) -> None:
        """Make `value` (JSON) readable by every rank under `key`."""
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        """The value under `key`, waiting for it. Raises UnavailableError naming `what` after `timeout_s`."""
        assert self.store is not None
        try:
            self._wait(key, timeout_s)
            raw = self.store.get(key)
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
            raise UnavailableError(
                f"rank {self.rank} timed out after {timeout_s:g} s waiting for {what}; if another rank has "
                f"failed, read its error first: {error}"
            ) from error
        try:
            value: object = json.loads(raw)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"rank {self.rank} found no settings under {key!r} in the process group's store")
        return value

    def problem_anywhere(self, key: str, problem: str | None, timeout_s: float) -> str | None:
        """A barrier with a word: returns one rank's problem to all ranks, None if no rank has any.

        Raises UnavailableError if not every rank has come by after `timeout_s`.
        """
        if self.store is None:
            return problem
        try:
            if problem is not None:
                self.store.set(f"{key}/problem", f"rank {self.rank}: {problem}")
            if self.store.add(f"{key}/count", 1) == self.size:
                self.store.set(f"{key}/all", "here")
            self._wait(f"{key}/all", timeout_s)
            if self.store.check([f"{key}/problem"]):
                return self.store.get(f"{key}/problem").decode(errors="replace")
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
            raise UnavailableError(
                f"rank {self.rank} timed out after {timeout_s:g} s waiting for the other ranks; if another "
                f"rank has failed, read its error first: {error}"
            ) from error
        return None

    def note(self, key: str) -> None:
        """Set a flag that every rank sees after the next barrier (`problem_anywhere`)."""
        if self.store is not None:
            self.store.set(key, "1")

    def noted(self, key: str) -> bool:
        """Whether any rank has set this flag."""
        return self.store is not None and self.store.check([key])

    def _wait(self, key: str, timeout_s: float) -> None:
        """For `key`, but no longer than until another rank says that it never comes: ConfigError then.

        Looks instead of store.wait(): that logs a warning of its own whenever it is given up to look elsewhere.
        """
        assert self.store is not None
        refused = "/".join(key.split("/")[:3]) + _REFUSED
        end_s, pause_s = mono_s() + timeout_s, _FIRST_LOOK_S
        while not self.store.check([key]):
            if self.store.check([refused]):
                text = self.store.get(refused).decode(errors="replace")
                raise ConfigError(f"another rank cannot start: {text}")
            if mono_s() >= end_s:
                raise dist.DistStoreError(f"no rank has set {key}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.25, _LOOK_S)


def tells_the_others(constructor: _Constructor) -> _Constructor:
    """A constructor, or a function that calls one, whose LastWordsError reaches ranks that wait for this one's word."""

    @functools.wraps(constructor)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return constructor(*args, **kwargs)
        except LastWordsError as error:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                # The others take the next prefix; a store that is gone has nobody to tell.
                with contextlib.suppress(RuntimeError, LastWordsError):
                    _default_store().set(f"{_prefix(_agreements + 1)}{_REFUSED}", f"rank {dist.get_rank()}: {error}")
            raise

    return cast(_Constructor, telling)


def next_prefix() -> str:
    """Store prefix of this process's next registration: every rank counts alike.

    Where torchrun's own store outlives its workers, what they wrote before a restart must not be found after it.
    """
    global _agreements
    _agreements += 1
    return _prefix(_agreements)


def _prefix(number: int) -> str:
    # Each node's torchrun counts its own failures only, so in a store that is made anew for each restart the count
    # would lead the nodes apart. (Where the store is torchrun's, torch itself can only restart a job of one.)
    outlives_us = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return f"lastwords/{restart_count() if outlives_us else 0}/{number}"


def launch_of(environ: Mapping[str, str], job: str = "") -> Launch:
    """What the environment says of the launcher; `job` is the name that the user gave, if any.

    Nothing of it is a process id of the launcher's: with `torchrun --no-python ./wrap.sh python train.py` the parent is
    another one after each restart. The directory of torchrun's error files is drawn once in the life of an agent.
    """
    error_file = PurePath(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    in_its_directory = len(error_file.parents) > 3 and error_file.parents[1].name.startswith("attempt_")
    pid = os.getpid()
    return Launch(
        job=job,
        run=environ.get("TORCHELASTIC_RUN_ID", ""),
        agent=str(error_file.parents[2]) if in_its_directory else "",
        endpoint=f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}",
        process=f"{host_id()}/{pid}/{start_ticks(pid)}",
        restarted=restart_count(environ) > 0,
    )


def restart_count(environ: Mapping[str, str] | None = None) -> int:
    """How often this node's torchrun has restarted its workers; 0 outside torchrun. Differs between nodes."""
    text = (os.environ if environ is None else environ).get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isascii() and text.isdigit() else 0


def _default_store() -> Store:
    if default_store is None:
        raise ConfigError(
            "this torch has no torch.distributed.distributed_c10d._get_default_store; "
            "use a torch release that lastwords was tested with (2.7 to 2.13)"
        )
    store: Store = default_store()
    return store
