"""Worker process, which communicates with the server. Mods do not import this package."""
