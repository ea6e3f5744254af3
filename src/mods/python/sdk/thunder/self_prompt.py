"""Another name for `thunder_mods.self_prompt`."""

from thunder_mods.self_prompt import *  # noqa: F401,F403
from thunder_mods.self_prompt import __all__  # noqa: F401
