"""The management API: models, and what is done with them.

management     register, scale, describe, unregister
swap           another archive in the place of a version
traffic        weights, sticky keys, labels
rollouts       shadows and roll-outs
desired_state  plan, apply, undo
workflows      graphs of models
events         what object stores tell, and what watches do
event_bodies   reads what object stores send
downloads      archives on their way
"""
