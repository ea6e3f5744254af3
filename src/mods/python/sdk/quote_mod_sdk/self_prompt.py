from typing import Any, List, Optional, Sequence

from thunder_mods.decorator import ModCallable
from thunder_mods.self_prompt import EraseMode, SelfPrompt, self_prompt_mod
from thunder_mods.strategies import ChoicesStrat

__all__ = ["EraseMode", "SelfPrompt", "self_prompt_constrained_mod", "self_prompt_mod"]


def self_prompt_constrained_mod(
    *,
    allowed_responses: Sequence[str],
    prompt_text: Optional[str] = None,
    prompt_tokens: Optional[List[int]] = None,
    completion_text: Optional[str] = None,
    erase_after_complete: Any = None,
    mask_value: float = -1e9,
    tokenizer: Any = None,
) -> ModCallable:
    """Creates a mod like `self_prompt_mod` with `ChoicesStrat`. The first versions of the Quote SDK had this function."""
    return self_prompt_mod(
        prompt=prompt_tokens if prompt_tokens is not None else prompt_text,
        strategy=ChoicesStrat(list(allowed_responses)),
        completion=completion_text,
        erase="prompt" if erase_after_complete == "prompt_only" else erase_after_complete,
        mask_value=mask_value,
    )
