"""`overlapPreprocess`: a handler's `preprocess` on a thread beside the batch that computes.

seam  a handler whose `preprocess` is called by itself, and the context of both threads
kept  what its steps share, by their source
"""

__all__: list[str] = []
