"""`@mod`: turns a function into a mod."""

import inspect
from functools import wraps

from . import events as _events
from .actions import for_event, validate_action

#: A mod as it can be called: (event, tokenizer=None) -> action.
ModCallable = object


def mod(handler=None, *, events=None, handles=None, name=None, description=None, config=None, holdback=0):
    """Makes `handler(event, actions, tokenizer)` a mod.

    events (or handles): the event classes or names it wants, all four by default; it is not called for others.
    name: its registered name, by default the function's.
    description: one sentence, by default the first paragraph of the docstring.
    config: the configuration's fields with their defaults. When given, a request's unknown fields are refused.
    holdback: the most generated tokens it may take back after they were added; the stream lags by that much, so
    that a client never sees what is taken back.
    """
    if handler is None:
        return lambda function: mod(
            function, events=events, handles=handles, name=name, description=description, config=config, holdback=holdback
        )
    if not callable(handler):
        raise TypeError("@mod stands before a function, not before %r" % (handler,))
    if inspect.iscoroutinefunction(handler):
        raise TypeError("a mod cannot be async: the run waits for its answer")
    arguments = _positional(handler)

    @wraps(handler)
    def wrapped(event, tokenizer=None):
        result = handler(*(event, for_event(event), tokenizer)[:arguments])
        return validate_action(event, result)

    text = description or (inspect.getdoc(handler) or "").split("\n\n")[0]
    wrapped.__thunder_mod__ = {
        "name": name or handler.__name__,
        "description": " ".join(text.split()),
        "handles": _event_names(events if events is not None else handles),
        "config": config,
        "holdback": int(holdback),
    }
    return wrapped


def create_mod(handler):
    """`mod` as a function."""
    return mod(handler)


def _positional(handler):
    """How many of (event, actions, tokenizer) the handler takes."""
    parameters = inspect.signature(handler).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    count = sum(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters)
    if count == 0:
        raise TypeError("%s takes no arguments; a mod takes (event, actions, tokenizer)" % handler.__name__)
    return min(count, 3)


def _event_names(wanted):
    if wanted is None:
        return list(_events.BY_NAME)
    if isinstance(wanted, (str, type)):
        wanted = [wanted]
    names = [event if isinstance(event, str) else event.__name__ for event in wanted]
    for name in names:
        if name not in _events.BY_NAME:
            raise ValueError("unknown event '%s'; events are %s" % (name, ", ".join(_events.BY_NAME)))
    return names
