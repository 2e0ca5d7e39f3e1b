"""What runs on the other machines of a cluster: fetch an archive, unpack it, start a worker, relay for it.

agent        relays between one worker and the server
server_end   its connection to the server
worker_run   the worker's socket, page and pipes
starting     what a worker needs before it can start
archives     archives on a node
receiving    an archive that the server sends
origins      object stores as a node reads them
placing      chooses the node for one more worker
ray_program  the only process that imports ray on the server's machine
"""
