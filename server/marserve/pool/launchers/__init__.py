"""How workers are started: in a new interpreter, forked from a template, or on another machine.

launcher   `Launchers` (one a server) and `Launcher` (one a version), which decides
forked     templates, and workers forked from them
fresh      a worker in a new interpreter
group      a worker that is several ranks
process    a process that the server started: its end, its signals
launched   a worker that was started, and its order to load
endpoints  the descriptors that a worker starts with
leftovers  ends what a worker left behind
cores      which workers keep to which processors
cgroups    a control group for each worker
remote/    workers on the nodes of a Ray cluster
"""
