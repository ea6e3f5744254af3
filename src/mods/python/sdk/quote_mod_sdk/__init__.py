"""Names that mods written for Quote import; all are provided by `thunder_mods`."""

import quote_mod_sdk.mod  # noqa: F401  (a module, for `from quote_mod_sdk.mod import …`)
from thunder_mods import *  # noqa: F401,F403  (and `mod` the decorator, for `from quote_mod_sdk import mod`)
from thunder_mods import __all__  # noqa: F401

# Names from the first versions of the Quote SDK.
from quote_mod_sdk.self_prompt import self_prompt_constrained_mod  # noqa: F401
from thunder_mods import Added as AddedEvent  # noqa: F401
from thunder_mods import ForwardPass as ForwardPassEvent  # noqa: F401
from thunder_mods import Prefilled as PrefilledEvent  # noqa: F401
from thunder_mods import Sampled as SampledEvent  # noqa: F401
