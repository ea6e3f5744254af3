"""Mods of a simulated run."""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Optional

from .. import quote
from ..config import fill_defaults
from ..decorator import mod as _decorate


class ActiveMod:
    """A mod of one run, with its configuration."""

    def __init__(self, function: Any, config: Dict[str, Any]) -> None:
        if isinstance(function, tuple):
            function, config = function
        decorated: Any = function if hasattr(function, "__thunder_mod__") else _decorate(function)
        self.call = decorated
        declaration: Dict[str, Any] = self.call.__thunder_mod__
        module = sys.modules.get(self.call.__module__)
        self.name = declaration["name"] or next((name for name, value in vars(module or self).items() if value is function), "mod")
        self.handles = declaration["handles"]
        self.layers: List[int] = declaration["hidden_states"]
        self.static_holdback = self.holdback = declaration["holdback"]
        #: Number of the answer's first tokens that the mod will not remove; None for all.
        self.discard_from: Optional[int] = None
        self.config = fill_defaults(config, declaration["config"], declaration["schema"])
        known_fields = config if declaration["schema"] is None else declaration["schema"]["properties"]
        unknown = [name for name in config if name not in known_fields]
        if unknown:
            raise ValueError("mod %s: unknown configuration field %s" % (self.name, ", ".join(unknown)))
        missing = [name for name in (declaration["schema"] or {}).get("required", ()) if name not in self.config]
        if missing:
            raise ValueError("mod %s: missing configuration field %s" % (self.name, ", ".join(missing)))
        self.is_quote = quote.is_imported_by(module)
        hook = getattr(module, "finished", None)
        self.finished = hook if callable(hook) and not hasattr(hook, "__thunder_mod__") else None

    def retracted(self, generated: int) -> None:
        """Handles the removal of all tokens of the answer after the first `generated`."""
        if self.discard_from is not None and generated <= self.discard_from:
            self.discard_from = None
