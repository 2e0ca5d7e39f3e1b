"""Weights that a model's configuration names by `checkpoint`, apart from the archive's model.

found  in the archive or in the model store, and judged
"""
