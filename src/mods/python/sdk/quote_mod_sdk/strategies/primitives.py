from thunder_mods.strategies.primitives import (
    CharsMode,
    CharsStrategy,
    ChoicesStrategy,
    TokensStrategy,
    UntilEndType,
    UntilStrategy,
)

__all__ = ["CharsMode", "CharsStrategy", "ChoicesStrategy", "TokensStrategy", "UntilEndType", "UntilStrategy"]
