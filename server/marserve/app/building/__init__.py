"""The parts of a server, made of the settings.

parts          all parts, in the order in which they are made
from_settings  makes the parts' options of the settings
models         launchers, pools, registry, workflows
watching       the places watched for new versions
devices        the accelerators' memory and figures
metrics        which metrics there are, and whether there are traces
access         keys and certificates
snapshots      the snapshot to restore, and the writer of further ones
stores         the fetcher of archives
desired_state  the desired state and its reconciler
routes         the routes of a listener, each with its key
tasks          tasks that run as long as the server
log_levels     the levels of logging that can be changed
cannot_start   the error that ends a start
"""
