"""`@mod`: turns a function into a mod."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any, Callable, Iterable, List, Mapping, Optional, Type, Union, overload

from . import events as _events
from .actions import ModAction, for_event, validate_action
from .config import declared

#: A mod as it can be called: (event, tokenizer=None) -> action.
ModCallable = Callable[..., ModAction]
#: What a mod is made of: handler(event, actions, tokenizer) -> action or None. It may take fewer arguments.
Handler = Callable[..., Optional[ModAction]]
#: The configuration of a mod: a class with annotations, or a dictionary of defaults.
Config = Union[None, Mapping[str, Any], type]
EventNames = Union[str, Type[_events.ModEvent], Iterable[Union[str, Type[_events.ModEvent]]]]


@overload
def mod(handler: Handler) -> ModCallable: ...


@overload
def mod(
    *,
    events: Optional[EventNames] = None,
    handles: Optional[EventNames] = None,
    name: Optional[str] = None,
    description: Optional[str] = None,
    config: Config = None,
    holdback: int = 0,
    workers: Optional[int] = None,
) -> Callable[[Handler], ModCallable]: ...


def mod(
    handler: Optional[Handler] = None,
    *,
    events: Optional[EventNames] = None,
    handles: Optional[EventNames] = None,
    name: Optional[str] = None,
    description: Optional[str] = None,
    config: Config = None,
    holdback: int = 0,
    workers: Optional[int] = None,
) -> Any:
    """Makes `handler(event, actions, tokenizer)` a mod.

    events (or handles): the event classes or names it wants, all four by default; it is not called for others.
    name: its registered name, by default the function's.
    description: one sentence, by default the first paragraph of the docstring.
    config: the configuration's fields, as a class with annotations (a dataclass, a TypedDict, or any other) or as a
    dictionary of defaults. A request's configuration is checked against them before its run begins: unknown fields,
    missing ones (annotated, without a default) and values of another type are refused. A dictionary says by its
    defaults which type a field has: text, number, true or false, list, object; None takes anything.
    holdback: the most generated tokens it may take back after they were added; the stream lags by that much, so
    that a client never sees what is taken back. `event.hold_back(n)` changes it during a run.
    workers: how many processes may serve it at once, for throughput; by default what the server says (`--mod-workers`).
    A run stays in one of them. What the module keeps is each process's own.
    """
    wanted = events if events is not None else handles
    if handler is None:
        return lambda function: _mod(function, wanted, name, description, config, holdback, workers)
    return _mod(handler, wanted, name, description, config, holdback, workers)


def _mod(
    handler: Handler,
    wanted: Optional[EventNames],
    name: Optional[str],
    description: Optional[str],
    config: Config,
    holdback: int,
    workers: Optional[int],
) -> ModCallable:
    if not callable(handler):
        raise TypeError("@mod stands before a function, not before %r" % (handler,))
    if inspect.iscoroutinefunction(handler):
        raise TypeError("a mod cannot be async: the run waits for its answer")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError("workers is how many processes may serve the mod, 1 or more, not %r" % (workers,))
    arguments = _positional(handler)
    fields = declared(config)

    @wraps(handler)
    def wrapped(event: _events.ModEvent, tokenizer: Any = None) -> ModAction:
        result = handler(*(event, for_event(event), tokenizer)[:arguments])
        return validate_action(event, result)

    text = description or (inspect.getdoc(handler) or "").split("\n\n")[0]
    wrapped.__thunder_mod__ = {  # type: ignore[attr-defined]
        "name": name or handler.__name__,
        "description": " ".join(text.split()),
        "handles": _event_names(wanted),
        "config": None if fields is None else fields.defaults,
        "schema": None if fields is None else fields.schema,
        "holdback": int(holdback),
        "workers": workers,
    }
    return wrapped


def create_mod(handler: Handler) -> ModCallable:
    """`mod` as a function."""
    return mod(handler)


def _positional(handler: Handler) -> int:
    """How many of (event, actions, tokenizer) the handler takes."""
    parameters = inspect.signature(handler).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    count = sum(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters)
    if count == 0:
        raise TypeError("%s takes no arguments; a mod takes (event, actions, tokenizer)" % handler.__name__)
    return min(count, 3)


def _event_names(wanted: Optional[EventNames]) -> List[str]:
    if wanted is None:
        return list(_events.BY_NAME)
    if isinstance(wanted, (str, type)):
        wanted = [wanted]
    names = [event if isinstance(event, str) else event.__name__ for event in wanted]
    for name in names:
        if name not in _events.BY_NAME:
            raise ValueError("unknown event '%s'; events are %s" % (name, ", ".join(_events.BY_NAME)))
    return names
