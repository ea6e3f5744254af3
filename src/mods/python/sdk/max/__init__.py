"""Module names that mods written for Quote import."""
