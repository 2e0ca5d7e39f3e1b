"""How versions come, change and go.

registering    one version: taken in, planned, installed, published, made ready; and retired
load_at_start  the models that a server loads when it starts
swap           another archive in the place of a version that serves
trial          whether a new version is fit for that, by its samples
transaction    many models at once, or nothing
actual         what a registry has, as data to compare a desired state with
dry_run        what a call would change, and whether it would be refused
kept_versions  versions taken off the list that stay loaded for a while
hooks          what else takes part in the life of a version
under_way      the tasks of changes
"""
