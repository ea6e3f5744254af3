"""Replacement for Modular's `max.driver`, for mods written for Quote."""

from thunder_mods.logits import Tensor  # noqa: F401
