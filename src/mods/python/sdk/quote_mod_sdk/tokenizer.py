from thunder_mods.tokenizer import tokenize

__all__ = ["tokenize"]
