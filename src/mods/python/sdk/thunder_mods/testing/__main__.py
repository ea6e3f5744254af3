"""`python -m thunder_mods.testing FILE`: runs the tests of a mod without pytest.

Tests are the functions `test_…` of the file and of `test_FILE` in the same folder. Exit codes: 0 all passed, 1 a test failed, 2 no
tests found, or a file cannot be imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("%s is not a Python file" % path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


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
        print("usage: python -m thunder_mods.testing FILE [--json]", file=sys.stderr)
        return 2
    file = Path(names[0]).resolve()
    test_file = file.with_name("test_" + file.name)
    sys.path.append(str(file.parent))  # at the end, so that a json.py in it does not shadow Python's own
    results: List[Dict[str, Any]] = []
    for path in [file] + ([test_file] if test_file.is_file() else []):
        try:
            module = _load(path)
        except KeyboardInterrupt:
            raise
        except BaseException:
            traceback.print_exc()
            return 2
        for name, value in list(vars(module).items()):
            # Imported tests belong to their own file.
            if name.startswith("test_") and inspect.isfunction(value) and value.__module__ == module.__name__:
                results.append(dict(_run(value), test="%s::%s" % (path.name, name)))
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
        print("no tests found in %s or %s; a test is a function named test_…" % (file.name, test_file.name), file=sys.stderr)
        return 2
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
