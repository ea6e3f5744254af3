from thunder_mods.logits import Tensor  # noqa: F401
