"""What a rank's tensors are called in the whole job, where the rank's own model numbers only what it has itself."""

from __future__ import annotations

from collections.abc import Callable

from lastwords.errors import ConfigError

Naming = Callable[[str], str]


class GlobalNames:
    """Own name of a parameter or buffer -> its name in the job; the same name where `naming` is None.

    A stage of a pipeline calls its first layer `layers.0`, and so does the next; a rank's first expert is `experts.0`.
    Raises ConfigError for a naming that gives no name, or one name to two tensors.

    >>> GlobalNames(lambda own: own.replace("layers.0.", "layers.4."))("layers.0.up.weight")
    'layers.4.up.weight'
    """

    def __init__(self, naming: Naming | None = None) -> None:
        if naming is not None and not callable(naming):
            raise ConfigError(
                f"names is {naming!r}; pass a function from a tensor's name in this rank's model to its name in the job"
            )
        self._naming = naming
        self._known: dict[str, str] = {}
        self._owner: dict[str, str] = {}

    def __call__(self, own: str) -> str:
        """The name in the job."""
        if self._naming is None or own.startswith("~"):
            return own
        if own not in self._known:
            name = self._naming(own)
            if not isinstance(name, str) or not name or name.startswith("~"):
                raise ConfigError(f"names({own!r}) is {name!r}; return the tensor's name in the job")
            other = self._owner.setdefault(name, own)
            if other != own:
                raise ConfigError(f"names calls both {other!r} and {own!r} {name!r}; give each tensor a different name")
            self._known[own] = name
        return self._known[own]
