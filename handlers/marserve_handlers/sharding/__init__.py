"""A model divided over the ranks of a worker (`parallel`), each of which loads its own part of the weights.

plan         which module has which style, what is wrong with a plan, and what a rank holds of it; pure
mesh         the ranks of a worker as a mesh of torch's
parallel     builds the model without its weights, divides it, and fills each rank's part
one_rank     samples, answered by the ranks and by the whole model on one
"""

__all__: list[str] = []
