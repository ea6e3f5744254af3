"""Serialization of a mod for its registration with a server."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Optional, Union


def serialize_mod(mod: Any, *, name: Optional[str] = None, description: Optional[str] = None) -> Dict[str, Any]:
    """Returns {language, module, entrypoint, source, name?, description?} for `POST /v1/mods`.

    `source` is the text of the mod's module; for a module of a package, {path: text} of all files of the package.
    Raises ValueError if the source cannot be read."""
    module = sys.modules.get(getattr(mod, "__module__", None) or "") or inspect.getmodule(mod)
    if module is None:
        raise ValueError("the mod must be defined in a module with readable source")
    payload: Dict[str, Any] = {
        "language": "python",
        "module": module.__name__,
        "entrypoint": _entrypoint(mod, module),
        "source": _source(module),
    }
    if name is not None:
        payload["name"] = name
    if description is not None:
        payload["description"] = description
    return payload


def _entrypoint(mod: Any, module: ModuleType) -> str:
    """Returns the name of the mod in its module, which can differ from the function's name."""
    own = getattr(mod, "__name__", None)
    if own is not None and getattr(module, own, None) is mod:
        return str(own)
    found = [name for name, value in vars(module).items() if value is mod]
    if not found and own is None:
        raise ValueError("module %s has no name for the mod" % module.__name__)
    return found[0] if found else str(own)


def _source(module: ModuleType) -> Union[str, Dict[str, str]]:
    try:
        text = textwrap.dedent(inspect.getsource(module))
    except (OSError, TypeError):
        raise ValueError("the source of module %s cannot be read" % module.__name__) from None
    top = module.__name__.partition(".")[0]
    package = sys.modules.get(top)
    if "." not in module.__name__ or package is None or not getattr(package, "__file__", None):
        return text
    root = Path(str(package.__file__)).parent
    files = sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)
    return {(top / path.relative_to(root)).as_posix(): path.read_text("utf-8") for path in files}
