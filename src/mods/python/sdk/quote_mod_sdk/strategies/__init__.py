from thunder_mods.strategies import *  # noqa: F401,F403
from thunder_mods.strategies import __all__  # noqa: F401
