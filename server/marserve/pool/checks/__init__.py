"""Whether a version may be given batches, and whether a worker is well.

certificate  decides, and says how much checking may cost
certifier    has samples checked in a worker
replays      has a worker run kept requests again as one batch
profiles     one worker measures its batches while it serves
health       what a handler says of its worker
"""
