"""The archiver's name for the parts of a manifest."""

__all__: list[str] = []
