"""What a process imports before it is needed."""

from __future__ import annotations

import atexit
import gc


def warm_up() -> None:
    """What torch imports at the first DDP model and optimizer, imported beforehand: seconds.

    Nothing is computed: torch's optimizers ask for a device at their first step, and a process that waits must not have
    one, nor call the script's global hooks. What is there then stays for ever: with `gc.freeze`, the collection between
    two stays in `main` only has to look at what the stay has made, where it would take some tenths of a second else.
    Not at the interpreter's end: only the collector finds the script's globals there (its functions and they form a
    cycle), and flushes what it has opened and not closed.
    """
    import numpy.ma  # noqa: F401
    import torch._dynamo
    import torch.nn.parallel
    import torch.optim
    import torch.profiler
    import torch.utils.data  # noqa: F401

    import lastwords.optim_wrapper.trainer.protect  # noqa: F401
    from lastwords.optim_wrapper.ddp.ddp_found import known_ddps

    known_ddps()  # those of the script, which are set aside as well; it is told of the later ones
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
