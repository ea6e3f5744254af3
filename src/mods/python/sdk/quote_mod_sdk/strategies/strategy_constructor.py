from thunder_mods.strategies.strategy_constructor import (  # noqa: F401
    CharsMode,
    CharsStrat,
    ChoicesStrat,
    ListStrat,
    StrategyConstructor,
    UntilEndType,
    UntilStrat,
)
