"""Handlers and tools for models that are larger than one device."""
