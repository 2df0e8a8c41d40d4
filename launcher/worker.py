"""`lastwords.run(main)`: a process of a dynamic cluster becomes its scheduler, or a worker; else `main` is called."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

import torch.distributed as dist

from lastwords import log_lines
from lastwords.errors import BusyError, ConfigError
from lastwords.launcher.environment import SCHEDULER, cluster_of
from lastwords.launcher.new_process import refused
from lastwords.optim_wrapper.launch.reporter import reporter

_called = False


def run(main: Callable[[], object]) -> None:
    """Run a training script's `main`, which takes no arguments; what it returns is dropped. Training thread only.

    Only a dynamic cluster needs it (docs/cluster.md): where the environment says that this is the scheduler it runs
    that, and in a worker a supervisor, which runs the script from its first line in other processes. Under `lastwords
    run`, torchrun and plain python it calls `main`. A ConfigError, here or in `main`, ends this process with one line
    and exit code 2, a BusyError with 5.
    """
    log_lines.begin(os.environ.get("RANK", ""))
    try:
        _run(main)
    except (ConfigError, BusyError) as error:
        raise refused(error, os.environ.get("RANK", "")) from error


def _run(main: Callable[[], object]) -> None:
    global _called
    if _called:
        raise ConfigError("lastwords.run(main) was called in this process before: call it once, for all the training")
    _called = True
    _refuse(main)
    if reporter() is None and (cluster := cluster_of(os.environ)) is not None:
        if dist.is_available() and dist.is_initialized():
            raise ConfigError(
                "init_process_group() was called before lastwords.run(main), which begins the script again in another "
                "process: call it in main()"
            )
        from lastwords.launcher.scheduler import schedule
        from lastwords.launcher.supervisor import become_supervisor

        if cluster.role != SCHEDULER:
            return become_supervisor()
        if code := schedule(cluster):
            raise SystemExit(code)
        return
    main()


def _refuse(main: Callable[[], object]) -> None:
    """ConfigError for what cannot be the `main` of a script."""
    if not callable(main) or inspect.iscoroutinefunction(main):
        hint = ": write lastwords.run(main), not lastwords.run(main())" if main is None else ""
        raise ConfigError(f"lastwords.run(main) takes a function without arguments, not {main!r:.60}{hint}")
    try:
        parameters = inspect.signature(main).parameters.values()
    except (ValueError, TypeError):  # one in C may not say what it takes
        return
    needed = [one.name for one in parameters
              if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]  # fmt: skip
    if needed:
        raise ConfigError(
            f"main() takes {', '.join(needed)}, and lastwords.run(main) has nothing to give: wrap it in a function "
            "without arguments, such as lambda: main(arguments)"
        )
