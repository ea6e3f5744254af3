from thunder_mods.strategies.strategy_constructor import (
    CharsMode,
    CharsStrat,
    ChoicesStrat,
    ListStrat,
    StrategyConstructor,
    UntilEndType,
    UntilStrat,
)

__all__ = ["CharsMode", "CharsStrat", "ChoicesStrat", "ListStrat", "StrategyConstructor", "UntilEndType", "UntilStrat"]
