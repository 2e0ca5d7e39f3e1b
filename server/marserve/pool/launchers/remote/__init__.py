"""Workers on other machines, below agents that Ray starts.

ray_launcher  starts the workers of a version with `launcher: ray`
cluster       the server's connection to a cluster: Ray's process, and the port for agents
remote        one such worker, as the pool sees it
authority     certificates for the connections to agents
"""
