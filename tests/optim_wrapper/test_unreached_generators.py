"""Generators in sets and caches are found where they are alone, and where a search ends is said."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lastwords.optim_wrapper.streams import generator_search
from lastwords.optim_wrapper.streams.generator_search import Unreached, search
from lastwords.optim_wrapper.streams.own_streams import OwnStreams
from tests import golden


def looked(value: Any) -> tuple[list[str], Unreached]:
    unreached = Unreached()
    found = search({"x": value}, frames=False, unreached=unreached)
    assert all(place.now() is generator for place, generator in found.values())
    return list(found), unreached


@functools.lru_cache(maxsize=8)
def bounded(seed: int) -> random.Random:
    return random.Random(seed)


@functools.cache
def unbounded(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_one_that_is_alone_in_a_set_is_found_and_several_are_named(kind: Callable[[Any], Any]) -> None:
    held = SimpleNamespace(streams=kind([random.Random(1), "a", 3]))
    assert looked(held)[0] == ["x.streams{}"]
    names, unreached = looked(kind([torch.Generator(), torch.Generator()]))
    assert names == []
    assert unreached.reasons == ["random generators in x cannot be distinguished, and are not saved"]


@pytest.mark.parametrize("cache", [bounded, unbounded])
def test_so_it_is_in_a_cache(cache: Any) -> None:
    cache.cache_clear()
    assert looked([cache])[0] == []
    made = cache(1)
    names, unreached = looked([cache])
    assert (names, unreached.reasons) == (["x[0]{}"], [])
    cache(2)
    assert "x[0]" in looked([cache])[1].reasons[0]
    cache.cache_clear()
    assert cache(1) is not made


def test_what_a_cached_function_uses_keeps_its_name() -> None:
    stream = random.Random(3)

    @functools.cache
    def used() -> float:
        return stream.random()

    assert looked(used)[0] == ["x.__wrapped__.stream"]


def test_two_at_one_place_are_named() -> None:
    def made(seed: int) -> Any:
        class Owner:
            stream = random.Random(seed)

        return Owner()

    names, unreached = looked([made(1), made(2)])
    assert len(names) == 1
    assert unreached.reasons == [f"there are two random generators at {names[0]}, and only the first is saved"]


def test_where_a_search_ends_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(generator_search, "user_frames", list)
    deep: Any = random.Random(1)
    for _ in range(12):
        deep = [deep]
    caplog.set_level(logging.INFO, "lastwords.optim_wrapper.streams.own_streams")
    streams = OwnStreams({"deep": deep, "wide": [[object()] for _ in range(30)]})
    streams.look()
    [line] = caplog.messages
    golden.says(line)
    monkeypatch.setattr(generator_search, "_OBJECTS_MAX", 10)
    streams.look()
    assert len(caplog.messages) == 1
    OwnStreams({"deep": deep, "wide": [[object()] for _ in range(30)]}).look()
    golden.says(caplog.messages[1])
    assert looked([1, 2])[1] == Unreached()


def test_long_names_that_begin_alike_are_two() -> None:
    held = {"a" * 500 + "1": random.Random(1), "a" * 500 + "2": random.Random(2)}
    streams = OwnStreams({"x": held})
    streams.look()
    assert len({name for name in streams.names if name.startswith("x[")}) == 2
