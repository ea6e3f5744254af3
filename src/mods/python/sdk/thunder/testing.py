"""Another name for `thunder_mods.testing`."""

from thunder_mods.testing import *  # noqa: F401,F403
from thunder_mods.testing import __all__  # noqa: F401
