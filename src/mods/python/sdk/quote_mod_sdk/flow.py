from thunder_mods.flow import *  # noqa: F401,F403
from thunder_mods.flow import __all__  # noqa: F401
