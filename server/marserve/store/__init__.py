"""Where archives come from: found by name, never by a path that leads out of the store."""
