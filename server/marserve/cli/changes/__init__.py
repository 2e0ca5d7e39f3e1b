"""Commands for many models at once, and for how requests are shared out.

plan     what a desired state would change
apply    have the models that a document says
undo     back to the document before; `history`
unnamed  asks what becomes of versions that no document names
rollout  let a version take over step by step
shadow   mirror requests to another version
traffic  weights and sticky keys
label    names of versions
"""
