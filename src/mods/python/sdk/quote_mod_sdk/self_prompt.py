from thunder_mods.self_prompt import EraseMode, SelfPrompt, self_prompt_mod

__all__ = ["EraseMode", "SelfPrompt", "self_prompt_mod"]
