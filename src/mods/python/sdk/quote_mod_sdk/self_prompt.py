from thunder_mods.self_prompt import EraseMode, SelfPrompt, self_prompt_mod  # noqa: F401
