import json
from dataclasses import dataclass
from typing import List, Literal

from thunder_mods import Prefilled, mod


@dataclass
class Settings:
    every: int
    ending: Literal["!", "."] = "!"
    words: List[str] = ()


@mod(events=[Prefilled], config=Settings)
def typed_config(event, actions, tokenizer):
    """Replaces the answer with its configuration."""
    return actions.force_output(tokenizer.encode(json.dumps(event.config)))
