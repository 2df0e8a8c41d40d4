"""Generators where no attribute, list or closure leads: each has a place there that a new process finds again."""

from __future__ import annotations

import contextvars
import functools
import itertools
import operator
import os
import random
import subprocess
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lastwords.optim_wrapper.streams import generator_search, places
from lastwords.optim_wrapper.streams.generator_search import Unreached, search

GLOBAL = random.Random(7)


class Env:
    """Keeps one, draws from it when it is called, and is a key by its identity."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __call__(self, *_: Any) -> float:
        raise AssertionError("the user's code was run")

    draw = __iter__ = __next__ = __call__


class Local(threading.local):
    """Counts how often its `__init__` is run."""

    made = 0

    def __init__(self) -> None:
        Local.made += 1
        self.rng = random.Random(1)


class Table(dict[str, Any]):
    """A dict with attributes, which answers for itself."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("the user's code was run")

    items = __iter__ = __getitem__  # type: ignore[assignment]


def in_local(rng: random.Random) -> Any:
    local = threading.local()
    local.rng = rng
    return local


def in_table(rng: random.Random) -> Any:
    table = Table()
    table.__dict__["rng"] = rng
    return table


def in_context(rng: random.Random) -> Any:
    variable = contextvars.ContextVar[Any]("rng")
    variable.set(rng)
    return variable


def in_module(rng: random.Random) -> Any:
    module = types.ModuleType("augmentations")
    module.RNG = rng  # type: ignore[attr-defined]
    return module


def decorated(rng: random.Random) -> Any:
    @torch.no_grad()
    def update() -> float:
        return rng.random()

    return update


def array(*values: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(values), object)
    made[:] = values
    return made


HOLDERS: dict[str, tuple[Callable[[random.Random], Any], str]] = {
    "threading.local": (in_local, "x.rng"),
    "object array": (lambda rng: array(None, rng), "x[1]"),
    "structured array": (lambda rng: np.array([(1, rng)], [("n", int), ("rng", object)]), "x[0][1]"),
    "map": (lambda rng: map(Env(rng), [1]), "x{Env 0}.rng"),
    "map of a closure": (lambda rng: map(lambda *_: rng.random(), [1], [2]), "x{function 0}.rng"),
    "map of a bound method": (lambda rng: map(Env(rng).draw, [1]), "x{method 0}.__self__.rng"),
    "filter": (lambda rng: filter(Env(rng), [1]), "x{Env 0}.rng"),
    "zip": (lambda rng: zip([Env(rng)], [1], strict=True), "x{tuple 0}[0]{list 0}[0].rng"),
    "repeat": (itertools.repeat, "x{Random 0}"),
    "starmap": (lambda rng: itertools.starmap(Env(rng), [(1,)]), "x{Env 0}.rng"),
    "cycle": (lambda rng: itertools.cycle([rng]), "x{list_iterator 0}{list 0}[0]"),
    "enumerate": (lambda rng: enumerate([rng]), "x{list_iterator 0}{list 0}[0]"),
    "next of an iterator": (lambda rng: iter([rng]).__next__, "x.__self__{list 0}[0]"),
    "mappingproxy": (lambda rng: types.MappingProxyType({"a": rng}), "x{dict 0}['a']"),
    "methodcaller": (lambda rng: operator.methodcaller("step", rng), "x{tuple 0}[0]"),
    "partial": (lambda rng: functools.partial(Env(rng), 1), "x.func.rng"),
    "partial of a partial": (lambda rng: functools.partial(functools.partial(print), file=rng), "x.keywords['file']"),
    "bound method": (lambda rng: Env(rng).draw, "x.__self__.rng"),
    "bound method of its own": (lambda rng: rng.random, "x{Random 0}"),
    "bound append": (lambda rng: [rng].append, "x{list 0}[0]"),
    "key": (lambda rng: {rng: 1}, "x[key 0]"),
    "part of a key": (lambda rng: {(1, Env(rng)): 1}, "x[key 0][1].rng"),
    "default_factory": (lambda rng: defaultdict(rng.random), "x.default_factory{Random 0}"),
    "attribute of a dict": (in_table, "x.rng"),
    "deque": (lambda rng: deque([rng]), "x[0]"),
    "context variable": (in_context, "x.get()"),
    "module": (in_module, "augmentations.RNG"),
    "decorated by torch": (decorated, "x.func.rng"),
}  # fmt: skip


def looked(value: Any, **roots: Any) -> tuple[list[str], Unreached]:
    unreached = Unreached()
    found = search({"x": value, **roots}, frames=False, unreached=unreached)
    assert all(place.now() is generator for place, generator in found.values())
    return list(found), unreached


@pytest.mark.parametrize("kind", HOLDERS)
def test_it_is_found_without_running_the_users_code(kind: str) -> None:
    hold, name = HOLDERS[kind]
    generator = random.Random(1)
    held = hold(generator)
    names, unreached = looked(held)
    assert (names, unreached) == ([name], Unreached())
    [(place, found)] = search({"x": held}, frames=False).values()
    assert found is generator is place.now()


@pytest.mark.parametrize("mechanism", ["referents", "items"])
def test_without_the_mechanism_they_are_not_found(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mechanism == "referents":
        monkeypatch.setattr(places, "unnamed", lambda value: iter(()))
        lost = {kind for kind, (_, name) in HOLDERS.items() if "{" in name}
    else:
        monkeypatch.setattr(generator_search._Search, "_look_into_items", lambda *_: None)
        lost = {kind for kind, (_, name) in HOLDERS.items() if "[" in name or "get()" in name} | {"threading.local"}
    seen = {kind for kind, (hold, _) in HOLDERS.items() if looked(hold(random.Random(1)))[0]}
    assert seen == HOLDERS.keys() - lost


@pytest.mark.parametrize("refer", [weakref.ref, weakref.proxy, lambda env: weakref.WeakValueDictionary({1: env}),
                                   lambda env: weakref.WeakSet([env]), weakref.WeakMethod,
                                   lambda env: weakref.WeakKeyDictionary({env: 1})])  # fmt: skip
def test_it_is_found_behind_a_weak_reference(refer: Callable[[Any], Any]) -> None:
    env = Env(random.Random(1))
    held = refer(env.draw if refer is weakref.WeakMethod else env)
    assert len(looked(held)[0]) == 1
    del env
    assert looked(held) == ([], Unreached()), "the search keeps nothing alive"


def test_what_a_weak_reference_shares_with_an_attribute_has_the_attributes_name() -> None:
    env = Env(random.Random(1))
    assert looked(weakref.ref(env), envs=[SimpleNamespace(env=env)])[0] == ["x().rng"]
    assert looked({"a": {"b": {"c": weakref.ref(env)}}}, env=env)[0] == ["env.rng"]


def test_of_threading_local_the_calling_thread_is_searched_and_the_others_are_named() -> None:
    local = in_local(random.Random(1))
    done, go_on = threading.Event(), threading.Event()

    def work() -> None:
        local.rng = random.Random(2)
        done.set()
        go_on.wait(30)

    worker = threading.Thread(target=work)
    worker.start()
    done.wait(30)
    try:
        names, unreached = looked(local)
    finally:
        go_on.set()
        worker.join()
    assert (names, unreached.reasons) == (["x.rng"], ["random generators of other threads in x are not saved"])
    del worker
    assert looked(local)[1] == Unreached()


def test_no_init_of_a_threading_local_is_run() -> None:
    local = Local()
    before = Local.made
    names: list[str] = []
    worker = threading.Thread(target=lambda: names.extend(looked(local)[0]))
    worker.start()
    worker.join()
    assert (Local.made, names) == (before, ["x.rng"])


def test_objects_with_generators_in_a_set_are_named_unless_there_is_another_way_to_them() -> None:
    envs = [Env(random.Random(n)) for n in range(3)]
    reason = "random generators in x cannot be distinguished, and are not saved"
    assert looked({*envs}) == ([], Unreached([reason]))
    assert looked({*envs}, z=[[envs]])[0] == [f"z[0][0][{n}].rng" for n in range(3)]
    assert looked({*envs}, z=[[envs]])[1] == Unreached()
    assert looked({(1, 2), (3, 4), print, random.random, np.random.rand}) == ([], Unreached()), "none of one's own"


def test_generators_in_a_long_list_or_dict_are_named() -> None:
    many: list[Any] = [Env(random.Random(n)) for n in range(300)]
    reason = "random generators in x are not saved: it has more than 256 items"
    assert looked(many) == looked(dict(enumerate(many))) == looked(array(*many)) == ([], Unreached([reason]))
    assert looked([object() for _ in range(300)]) == ([], Unreached())


def test_a_default_is_not_made() -> None:
    held: Any = defaultdict(lambda: random.Random(1))
    held["a"] = random.Random(2)
    [(place, _)] = search({"x": held}, frames=False).values()
    del held["a"]
    assert place.now() is None
    assert "a" not in held


SCRIPT = """
import itertools, random, threading, weakref
from tests.optim_wrapper import test_hidden_generators as here

held = {kind: hold(random.Random(1)) for kind, (hold, _) in here.HOLDERS.items()}
envs = [here.Env(random.Random(n)) for n in range(8)]
roots = {**held, "set": {*envs}, "alone": {random.Random(1)}, "two": {random.Random(1), random.Random(2)}}
unreached = here.Unreached()
print(*here.search(roots, frames=False, unreached=unreached), *unreached.reasons, sep="\\n")
"""


def test_the_names_are_the_same_in_every_process() -> None:
    def names(seed: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2], check=True, text=True,
                              capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed})  # fmt: skip
        return done.stdout.splitlines()

    once = names("1")
    assert len(once) == len(HOLDERS) + 1 + 2
    assert names("2") == once
