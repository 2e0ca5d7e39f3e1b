"""Memory of the host and of its devices: which loads and workers fit, and which models are evicted for them.

ledger          what is reserved of the host and of each device, which reservations wait, which are about to come free
needs           how much a version takes, before it is loaded
eviction        which models are put to sleep, and which device a worker gets if none has room
waiting_line    grants reservations that fit, and evicts models for the others
host_memory     a pool's reservations of the host's memory; measures processes
device_memory   a pool's reservations of devices, and which device a worker gets
device_moves    which devices the next worker of a slot gets while devices are lost
learned_memory  how much versions took so far, kept in a file
"""
