"""Another name for `thunder_mods`."""

from thunder_mods import *  # noqa: F401,F403
from thunder_mods import __all__  # noqa: F401
