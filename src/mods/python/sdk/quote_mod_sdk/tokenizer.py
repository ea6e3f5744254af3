from thunder_mods.tokenizer import tokenize  # noqa: F401
