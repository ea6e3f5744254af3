"""Compatibility with mods that import Quote's SDK."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any, Callable, Optional

#: Packages that only mods written for Quote import.
PACKAGES = ("quote_mod_sdk", "shared")


def is_loaded() -> bool:
    """Returns True if this process has imported one of Quote's packages. A worker serves a single mod."""
    return any(name in sys.modules for name in PACKAGES)


@lru_cache(maxsize=None)
def is_imported_by(module: Optional[ModuleType]) -> bool:
    """Returns True if the source of the module imports one of Quote's packages; False without source."""
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):
        return False
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.append(node.module or "")
    return any(name.split(".")[0] in PACKAGES for name in imported)


def adapt_handler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler for a function without `@mod`, which Quote calls as function(event, tokenizer)."""
    count = len(inspect.signature(function).parameters)
    if count > 2:
        return function

    def handler(event: Any, actions: Any, tokenizer: Any) -> Any:
        return function(*(event, tokenizer)[:count])

    handler.__name__, handler.__doc__, handler.__module__ = function.__name__, function.__doc__, function.__module__
    return handler


def quote_step(step: int) -> int:
    """Returns Quote's number of a step: 0 for Prefilled and for the first ForwardPass, Sampled and Added (1 in the trace)."""
    return max(0, step - 1)
