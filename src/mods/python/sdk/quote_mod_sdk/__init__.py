"""The names that mods written for Quote import; everything comes from `thunder_mods`."""

import quote_mod_sdk.mod  # noqa: F401  (a module, for `from quote_mod_sdk.mod import …`)
from thunder_mods import *  # noqa: F401,F403  (and `mod` the decorator, for `from quote_mod_sdk import mod`)
from thunder_mods import __all__  # noqa: F401
