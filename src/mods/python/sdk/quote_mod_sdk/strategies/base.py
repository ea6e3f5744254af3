from thunder_mods.strategies.base import (  # noqa: F401
    RuntimeState,
    Strategy,
    decode_token,
    require_token_ids,
    tokenize_str,
)
