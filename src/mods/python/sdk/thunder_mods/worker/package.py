"""Import of a mod that consists of several files, from memory."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import linecache
import sys
from types import ModuleType
from typing import Any, Dict, Optional

#: Names that a package of a mod must not have.
_RESERVED = {"thunder_mods", "thunder", "quote_mod_sdk", "shared", "max"}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, files: Dict[str, str]) -> None:
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        base = name.replace(".", "/")
        for file, is_package in ((base + "/__init__.py", True), (base + ".py", False)):
            if file in self._files:
                return importlib.machinery.ModuleSpec(name, self, origin=file, is_package=is_package)
        if any(file.startswith(base + "/") for file in self._files):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # a folder without __init__.py
        return None

    def exec_module(self, module: ModuleType) -> None:
        file = module.__spec__.origin if module.__spec__ is not None else None
        if file is None:
            return
        source = self._files[file]
        module.__file__ = file
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)


def load(files: str, module: str) -> Dict[str, Any]:
    """Imports `module` of a package and returns its names and its `__name__`. `files` is {path: text} as JSON."""
    texts: Dict[str, str] = json.loads(files)
    known = set(getattr(sys, "stdlib_module_names", ())) | set(sys.builtin_module_names) | _RESERVED
    for name in sorted({path.split("/")[0].partition(".")[0] for path in texts}):
        if name in known:
            raise ImportError("a file or folder of a mod must not be named %s, which is the name of another module" % name)
    sys.meta_path.insert(0, _Finder(texts))
    found = vars(importlib.import_module(module))
    return {name: value for name, value in found.items() if name == "__name__" or not name.startswith("__")}
