"""The management API.

management     register, scale, describe, unregister
swap           another archive in the place of a version
statistics     what versions did in the last minutes
traffic        weights, sticky keys, labels
rollouts       shadows and roll-outs
desired_state  plan, apply, undo
workflows      graphs of models
events         events of object stores, and the watches
event_bodies   reads the bodies of such events
archives       archives that clients upload
profiles       one worker is measured while it serves
optimising     which build of a version serves
replays        recorded requests that are run again
downloads      archives that are being fetched
"""
