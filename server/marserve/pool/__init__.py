"""One pool a model version: queue, batcher, dispatcher (pure), and the supervisor that owns its worker processes."""
