"""Removal of per-run state when a run ends, without code in the mod."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

_watching: "WeakSet[Any]" = WeakSet()


def watch(holder: Any) -> None:
    """Registers an object whose `finished(request_id)` is called at the end of every run, as long as it lives."""
    _watching.add(holder)


def ended(request_id: str) -> None:
    """Notifies the registered objects that a run has ended; called by the worker and by the testing engine."""
    for holder in list(_watching):
        holder.finished(request_id)
