"""Models whose weights lie apart from them (`checkpoint`), and models divided over the ranks of a worker (`parallel`).

plan                which module has which style, what is wrong with a plan, and what a rank holds of it; pure
mesh                the ranks of a worker as a mesh of torch's
parallel            builds the model without its weights, divides it, and fills each rank's part
one_rank            samples, answered by the ranks and by the whole model on one
meta_load           an eager model without its numbers, filled from a checkpoint
dcp_reader          reads the checkpoints of torch.distributed.checkpoint, the parts that are asked for
safe_files          reads safetensors files, mapped or into memory of its own
stored              reads a part of a tensor whose numbers lie in a file one behind the other
checkpoint_weights  the weights of a checkpoint part by part, for ranks
tied                parameters that have several names
"""

__all__: list[str] = []
