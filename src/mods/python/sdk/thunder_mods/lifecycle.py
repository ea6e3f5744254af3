"""Automatic removal of per-run state when a run ends."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

_registered: "WeakSet[Any]" = WeakSet()


def register(owner: Any) -> None:
    """Registers an object. Its `finished(request_id)` is called at the end of every run, as long as the object exists."""
    _registered.add(owner)


def notify_finished(request_id: str) -> None:
    """Notifies the registered objects that a run has ended; called by the worker and by the testing engine."""
    for owner in list(_registered):
        owner.finished(request_id)
