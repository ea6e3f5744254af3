from thunder import tokenize  # noqa: F401
