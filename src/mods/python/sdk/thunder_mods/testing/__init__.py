"""Tests of mods without a server or a model.

    from thunder_mods.testing import run

    def test_calm():
        result = run(calm, model="Hello! How are you?")
        assert result.check().text == "Hello. How are you?"

`run` simulates the engine: the four events, backtracking, forced tokens, edited logits, replaced prompts, several mods in
order, and limits of tokens and steps. The model is a text to write (`Scripted`), {end of a question: answer}, a function
from tokens to logits, or `RandomWeights(seed)`.
"""

import importlib.util as _importlib_util
import sys as _sys

from .engine import Engine, run
from .models import RandomWeights, Scripted
from .result import Call, Event, Result
from .vocabulary import WordTokenizer

__all__ = ["Call", "Engine", "Event", "RandomWeights", "Result", "Scripted", "WordTokenizer", "run"]


def _provide_max_driver() -> None:
    """Provides max.driver, which mods written for Quote import, outside of a worker."""
    import types

    from ..logits import Tensor

    package, driver = types.ModuleType("max"), types.ModuleType("max.driver")
    package.__path__ = []
    driver.Tensor = Tensor  # type: ignore[attr-defined]
    package.driver = driver  # type: ignore[attr-defined]
    _sys.modules.update({"max": package, "max.driver": driver})


if "max" not in _sys.modules and _importlib_util.find_spec("max") is None:
    _provide_max_driver()
