"""Scorers of experiments: a function `score(text)` or `score(text, cell)`."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Optional

#: Function of a scorer, called with the answer and the properties of its cell.
Scorer = Callable[[str, Dict[str, Any]], Any]


def find_scorer(module: Any, file: str) -> Scorer:
    """Returns the function `score` of a module as a function of two arguments."""
    function = getattr(module, "score", None)
    if not callable(function):
        raise AttributeError("%s has no function 'score'; define `def score(text):` or `def score(text, cell):`" % file)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # such as a class of C code
        return lambda text, cell: function(text)
    for arguments in ((None, None), (None,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return function if len(arguments) == 2 else lambda text, cell: function(text)
    raise TypeError("score must take (text) or (text, cell), but it takes %s" % signature)


def call_scorer(function: Scorer, text: str, cell: Dict[str, Any]) -> Optional[float]:
    """Returns the score of an answer; None for no score."""
    score = function(text, cell)
    if score is None:
        return None
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(score, (str, bytes)) or not 0.0 <= number <= 1.0:
        raise ValueError("score must return a number from 0 to 1, a bool or None, got %.60r" % (score,))
    return number
