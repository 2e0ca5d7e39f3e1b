"""Registers, changes and removes versions.

registering    takes in, plans, installs and publishes one version, waits for it, and retires it
load_at_start  loads the models of the start
copying        what registers a version once more, to be measured
swap           replaces a version that serves by another archive's
rebuilding     gives a version that serves another build of its model
trial          tries a new version's samples before it replaces another one
transaction    changes many models at once, or nothing
actual         the registered models as plain data, for comparison with a desired state
read_actual    how a registered version becomes that data
dry_run        what a call would change, and whether it would be refused
kept_versions  versions off the list that stay loaded for a while
hooks          what other parts do in the life of a version
under_way      the tasks of changes
"""
