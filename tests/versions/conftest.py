"""Syntax trees are made by the million here, and are no rubbish to look for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """Parsing takes half the time; the trees have no cycles, so they go with their last reference all the same."""
    gc.disable()
    yield
    gc.enable()
