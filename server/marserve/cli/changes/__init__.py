"""Commands for many models at once, and for the split of requests among versions.

plan     what a desired state would change
estimate the memory that weights take on each rank
apply    have the models that a document says
undo     back to the document before; `history`
unnamed  asks whether to unload or adopt versions that no document names
rollout  let a version take over step by step
shadow   mirror requests to another version
traffic  weights and sticky keys
label    names of versions
"""
