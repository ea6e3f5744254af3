from thunder_mods.strategies.primitives import (  # noqa: F401
    CharsMode,
    CharsStrategy,
    ChoicesStrategy,
    TokensStrategy,
    UntilEndType,
    UntilStrategy,
)
