"""The accelerator that a worker uses.

device_use     whether the model can compute on it
device_memory  how much is taken, and giving back
device_loss    whether it still answers
"""
