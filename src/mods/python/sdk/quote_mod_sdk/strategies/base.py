from thunder_mods.strategies.base import (
    RuntimeState,
    Strategy,
    TrieNode,
    decode_token,
    require_token_ids,
    tokenize_str,
)

__all__ = ["RuntimeState", "Strategy", "TrieNode", "decode_token", "require_token_ids", "tokenize_str"]
