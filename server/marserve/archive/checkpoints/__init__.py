"""Checkpoints beside a model: what is in them, read from their headers alone. Nothing in them is unpickled, no torch.

checkpoint         a folder's checkpoint, of either kind
dcp_metadata       the folders of torch.distributed.checkpoint
pickled_values     the values of a pickle, without its classes
safetensors_index  safetensors files, one or several
json_entries       objects of JSON entry by entry
checked_files      an archive's pickles, with those in such folders
estimate           what its weights take on each rank of a plan
hollow             the weights of an archive without their numbers
contents           what a checkpoint holds, and how it is refused
"""
