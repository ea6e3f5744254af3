//! Mods in Python: one worker process per mod, never inside the server.
