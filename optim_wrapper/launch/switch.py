"""The switch of the upstream system, `MS_ENABLE_TFT='{TTP:1}'`: whether last words are on."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lastwords.errors import ConfigError

_log = logging.getLogger(__name__)

VARIABLE = "MS_ENABLE_TFT"
RIGHT_FORM = "{TTP:1} (on) or {TTP:0} (off)"
IGNORED_KEYS = ("UCE", "ARF", "TSP", "HCCE", "RSC")
"""Keys that the upstream system knows beside TTP. Nothing here answers to them."""

_ENTRY = re.compile(r"""\s*(["']?)([A-Za-z_]+)\1\s*:\s*(["']?)([01])\3\s*""")


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether last words are on, and which upstream keys were set to 1 without effect here."""

    enabled: bool
    ignored: tuple[str, ...] = ()


def parse_switch(text: str | None) -> Switch:
    """Read the value of MS_ENABLE_TFT; None and an empty text are the default, on.

    Quotes round keys and values, spaces and a trailing comma are accepted, as upstream does. Without a TTP
    key the default stands. Raises ConfigError that shows the value and the right form.

    >>> parse_switch(None), parse_switch("{TTP:0}")
    (Switch(enabled=True, ignored=()), Switch(enabled=False, ignored=()))
    >>> parse_switch("{ 'TTP': 1, UCE:1 }")
    Switch(enabled=True, ignored=('UCE',))
    """
    if text is None or not text.strip():
        return Switch(True)
    body = text.strip()
    if len(body) >= 2 and body[0] == body[-1] and body[0] in "\"'":
        body = body[1:-1].strip()
    if not (body.startswith("{") and body.endswith("}")):
        raise _malformed(text, "the braces are missing")
    entries = body[1:-1].split(",")
    if not entries[-1].strip():
        entries.pop()
    values: dict[str, bool] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise _malformed(text, f"{entry.strip()!r} is not of the form KEY:0 or KEY:1")
        key = match[2]
        if key != "TTP" and key not in IGNORED_KEYS:
            raise _malformed(text, f"{key!r} is not one of the keys TTP, {', '.join(IGNORED_KEYS)}")
        if key in values:
            raise _malformed(text, f"{key} is given twice")
        values[key] = match[4] == "1"
    return Switch(values.get("TTP", True), tuple(key for key in IGNORED_KEYS if values.get(key)))


def switch_from_env(environ: Mapping[str, str] | None = None) -> Switch:
    """The switch as the environment sets it; logs one line for keys that have no effect here."""
    switch = parse_switch((os.environ if environ is None else environ).get(VARIABLE))
    if switch.ignored:
        _log.warning("%s: %s has no effect in lastwords; only TTP has an effect", VARIABLE, ", ".join(switch.ignored))
    return switch


def _malformed(text: str, why: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}={text!r} is malformed: {why}; set it to {RIGHT_FORM}, or unset it (on)")
