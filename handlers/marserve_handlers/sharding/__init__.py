"""Models whose weights lie apart from them, and models that span several processes.

meta_load   an eager model without its numbers, filled from a checkpoint
dcp_reader  reads the checkpoints of torch.distributed.checkpoint, exactly the bytes that are asked for
safe_files  reads safetensors files, mapped or into memory of its own
tied        parameters that have several names
"""

__all__: list[str] = []
