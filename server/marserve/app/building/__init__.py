"""The parts of a server, made of the settings.

parts          all parts, in the order in which they are made
from_settings  settings as the options that parts ask for
models         launchers, pools, registry, workflows
watching       what is watched for new versions
devices        the accelerators' memory and figures
metrics        which metrics there are
access         keys and certificates
snapshots      which is restored, what writes further ones
stores         what fetches archives
desired_state  what keeps the desired state
routes         which routes a listener answers, with which key
tasks          tasks that run beside the server
cannot_start   what ends a start
"""
