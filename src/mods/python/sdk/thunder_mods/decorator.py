"""`@mod`: turns a function into a mod."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any, Callable, Iterable, List, Mapping, Optional, Type, Union, overload

from . import events as _events
from .actions import ModAction, for_event, validate_action
from .config import parse_config

#: A mod as a callable: (event, tokenizer=None) -> action.
ModCallable = Callable[..., ModAction]
#: Function of a mod: handler(event, actions, tokenizer) -> action or None. It may take fewer arguments.
Handler = Callable[..., Optional[ModAction]]
#: Configuration of a mod: a class with annotations, or a dictionary of defaults.
Config = Union[None, Mapping[str, Any], type]
EventNames = Union[str, Type[_events.ModEvent], Iterable[Union[str, Type[_events.ModEvent]]]]

#: Maximum number of layers of a model.
_MAX_LAYERS = 512
#: Larger counts have the effect of this one.
_MAX_COUNT = 2**31 - 1


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
    hidden_states: Union[int, Iterable[int]] = (),
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
    hidden_states: Union[int, Iterable[int]] = (),
) -> Any:
    """Turns `handler(event, actions, tokenizer)` into a mod.

    events (or handles): classes or names of the events that the mod handles, by default all four.
    name: registered name, by default the name of the function.
    description: one sentence, by default the first paragraph of the docstring.
    config: fields of the configuration, as a class with annotations (a dataclass, a TypedDict, or any other) or as a
    dictionary of defaults. The configuration of a request is validated before its run starts: unknown fields, missing
    fields (annotated, without a default) and values of another type are rejected. In a dictionary, the default
    determines the type of a field: string, number, boolean, array or object; None accepts anything.
    holdback: maximum number of generated tokens that the mod may remove after they were added. The stream is
    delayed by as many tokens, so that a client never sees removed text. `event.hold_back(n)` changes it during a run.
    workers: maximum number of processes that serve the mod in parallel; by default the server's `--mod-workers`. A run
    stays in one process. Module-level state is separate in each process.
    hidden_states: layers whose hidden states the mod reads with `event.hidden_state(layer)`, from 0; negative numbers
    count from the last layer, which is -1. The layers of all mods of a run are copied at every step.
    """
    selected = events if events is not None else handles
    if handler is None:
        return lambda function: _mod(function, selected, name, description, config, holdback, workers, hidden_states)
    return _mod(handler, selected, name, description, config, holdback, workers, hidden_states)


def _mod(
    handler: Handler,
    selected: Optional[EventNames],
    name: Optional[str],
    description: Optional[str],
    config: Config,
    holdback: int,
    workers: Optional[int],
    hidden_states: Union[int, Iterable[int]],
) -> ModCallable:
    if not callable(handler):
        raise TypeError("@mod must decorate a function, got %r" % (handler,))
    if inspect.iscoroutinefunction(handler):
        raise TypeError("a mod cannot be async: the run waits for its reply")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError("a mod cannot be a generator: it must return its action, not yield it")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError("workers must be an integer of 1 or more, got %.100r" % (workers,))
    if int(holdback) < 0:
        raise ValueError("holdback must be an integer of 0 or more, got %.100r" % (holdback,))
    if name is not None and not isinstance(name, str):
        raise ValueError("name must be a string, got %.100r" % (name,))
    arguments = _count_arguments(handler)
    fields = parse_config(config)

    @wraps(handler)
    def wrapped(event: _events.ModEvent, tokenizer: Any = None) -> ModAction:
        result = handler(*(event, for_event(event), tokenizer)[:arguments])
        return validate_action(event, result)

    text = description or (inspect.getdoc(handler) or "").split("\n\n")[0]
    wrapped.__thunder_mod__ = {  # type: ignore[attr-defined]
        "name": name or handler.__name__,
        "description": " ".join(text.split()),
        "handles": _event_names(selected),
        "config": None if fields is None else fields.defaults,
        "schema": None if fields is None else fields.schema,
        "holdback": min(int(holdback), _MAX_COUNT),
        "workers": None if workers is None else min(workers, _MAX_COUNT),
        "hidden_states": _layers(hidden_states),
    }
    return wrapped


def create_mod(handler: Handler) -> ModCallable:
    """Turns a function into a mod, like `mod`."""
    return mod(handler)


def _count_arguments(handler: Handler) -> int:
    """Returns how many of (event, actions, tokenizer) the handler takes."""
    # Of the function that is called, which may pass further arguments to the one that it wraps.
    parameters = list(inspect.signature(handler, follow_wrapped=False).parameters.values())
    positional = _positional(parameters)
    others = positional[3:] + [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    required = [parameter.name for parameter in others if parameter.default is parameter.empty]
    if required:
        raise TypeError(
            "%s requires the argument `%s`, but a mod is called with (event, actions, tokenizer); remove it or give it a default"
            % (handler.__name__, required[0])
        )
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        # A wrapper with `*args` takes the arguments of the function that it wraps.
        parameters = list(inspect.signature(handler).parameters.values())
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return 3
        positional = _positional(parameters)
    if not positional:
        raise TypeError("%s takes no arguments; a mod must take (event, actions, tokenizer)" % handler.__name__)
    return min(len(positional), 3)


def _positional(parameters: Iterable[inspect.Parameter]) -> List[inspect.Parameter]:
    return [parameter for parameter in parameters if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]


def _layers(layers: Union[int, Iterable[int]]) -> List[int]:
    """Returns the declared layers without repetitions."""
    numbers = [layers] if isinstance(layers, int) else list(layers)
    for layer in numbers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -_MAX_LAYERS <= layer < _MAX_LAYERS:
            raise ValueError("hidden_states must be layer numbers, such as [0, 12, -1], got %.100r" % (layer,))
    return list(dict.fromkeys(numbers))


def _event_names(selected: Optional[EventNames]) -> List[str]:
    if selected is None:
        return list(_events.BY_NAME)
    if isinstance(selected, (str, type)):
        selected = [selected]
    names = [event if isinstance(event, str) else event.__name__ for event in selected]
    for name in names:
        if name not in _events.BY_NAME:
            raise ValueError("unknown event '%s'; known events: %s" % (name, ", ".join(_events.BY_NAME)))
    return names
