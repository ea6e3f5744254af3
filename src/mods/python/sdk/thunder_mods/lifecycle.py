"""What keeps state by run forgets it when the run ends, without the mod having to say so."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

_watching: "WeakSet[Any]" = WeakSet()


def watch(holder: Any) -> None:
    """Has `holder.finished(request_id)` called at the end of every run, for as long as the holder lives."""
    _watching.add(holder)


def ended(request_id: str) -> None:
    """The run is over; called by the worker and by the testing engine."""
    for holder in list(_watching):
        holder.finished(request_id)
