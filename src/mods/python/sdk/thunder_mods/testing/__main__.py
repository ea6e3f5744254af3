"""`python -m thunder_mods.testing FILE|FOLDER`: runs the tests of a mod without pytest.

Tests are the functions `test_…` of the file, or of the files of a package, and of `test_NAME.py` next to it. Exit codes: 0 all passed,
1 a test failed, 2 no tests found, or a file cannot be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List, Tuple

from ..worker.package import load


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("%s is not a Python file" % path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_package(folder: Path) -> List[Tuple[str, ModuleType]]:
    """Imports a package from memory, like a server. Returns its modules with tests, by path."""
    texts: Dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder.parent)
        if all(part.isidentifier() for part in file.with_suffix("").parts) and "__pycache__" not in file.parts:
            texts[file.as_posix()] = path.read_text("utf-8")
    load(json.dumps(texts), folder.name)
    tests = [file for file, text in texts.items() if "def test_" in text]
    return [(file, importlib.import_module(re.sub(r"(/__init__)?\.py$", "", file).replace("/", "."))) for file in tests]


def _load_all(path: Path) -> List[Tuple[str, ModuleType]]:
    """Imports a file or package and its tests. Returns the modules with tests, by path."""
    if path.is_dir():
        modules = _load_package(path)
    else:
        modules = [(path.name, _load(path))]
    # For the tests only, because a server has no other files. At the end, so that a json.py does not shadow Python's own.
    sys.path.append(str(path.parent))
    test_file = path.with_name("test_%s.py" % path.stem)
    if test_file.is_file():
        modules.append((test_file.name, _load(test_file)))
    return modules


def _run(function: Any) -> Dict[str, Any]:
    if any(parameter.default is parameter.empty for parameter in inspect.signature(function).parameters.values()):
        return {"outcome": "skipped", "message": "it takes arguments; run it with pytest"}
    output, started_at = io.StringIO(), time.perf_counter()
    result: Dict[str, Any] = {"outcome": "passed", "message": None}
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a mod may call sys.exit()
        trace = error.__traceback__
        lines = traceback.format_exception(type(error), error, trace.tb_next if trace is not None else None)
        result = {"outcome": "failed", "message": "".join(lines).rstrip()}
    return dict(result, output=output.getvalue(), elapsed_ms=round(1000 * (time.perf_counter() - started_at), 3))


def main(arguments: List[str]) -> int:
    as_json = "--json" in arguments
    names = [argument for argument in arguments if argument != "--json"]
    if len(names) != 1:
        print("usage: python -m thunder_mods.testing FILE|FOLDER [--json]", file=sys.stderr)
        return 2
    # Not the target of a link, because the name is that of the package.
    path = Path(os.path.abspath(names[0]))
    try:
        modules = _load_all(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a mod may call sys.exit()
        traceback.print_exc()
        if path.is_file() and isinstance(error, ModuleNotFoundError) and path.with_name("%s.py" % error.name).is_file():
            hint = "%s imports %s.py, but a server has only %s; make both a package: `thunder mods test FOLDER`"
            print(hint % (path.name, error.name, path.name), file=sys.stderr)
        return 2
    results: List[Dict[str, Any]] = []
    for file, module in modules:
        for name, value in list(vars(module).items()):
            # Imported tests belong to their own file.
            if name.startswith("test_") and inspect.isfunction(value) and value.__module__ == module.__name__:
                results.append(dict(_run(value), test="%s::%s" % (file, name)))
    counts = {word: sum(result["outcome"] == word for result in results) for word in ("passed", "failed", "skipped")}
    if as_json:
        print(json.dumps(dict(counts, tests=results)))
    else:
        for result in results:
            print("%-7s %s" % (result["outcome"], result["test"]))
            if result["outcome"] == "failed":
                print(result.get("output", "") + str(result["message"]))
            elif result["outcome"] == "skipped":
                print("        " + str(result["message"]))
        print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % counts)
    if counts["passed"] + counts["failed"] == 0:
        print("no tests found in %s or test_%s.py; a test is a function named test_…" % (path.name, path.stem), file=sys.stderr)
        return 2
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
