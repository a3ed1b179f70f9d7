"""Which parameters ``make test`` runs. ``make test-all`` runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def keep(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Leave values that are not in ``kept`` to ``make test-all``."""
    return [pytest.param(value, marks=() if value in kept else pytest.mark.all) for value in values]


def selected(request: pytest.FixtureRequest) -> list[str]:
    """Return each ``name`` for which this run has a test in the module of ``request``."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [str(item.callspec.params["name"]) for item in items if hasattr(item, "callspec") and "name" in item.callspec.params]
