"""Whether a version may be given batches, and whether a worker is well.

certificate  decides, and says how much checking may cost
certifier    has samples checked in a worker
health       what a handler says of its worker
"""
