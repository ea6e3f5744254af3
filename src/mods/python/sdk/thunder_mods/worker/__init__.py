"""The worker process: what the server talks to. Mods do not import this."""
