"""Whether a version may be given batches.

certificate  decides, and says how much checking may cost
certifier    has samples checked in a worker
"""
