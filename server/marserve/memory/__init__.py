"""Memory of the machine and of its devices: which loads and workers there is room for, and what makes room.

ledger          what is reserved of the host and of each device, which reservations wait, which are about to come free
needs           what a version takes, before it is loaded
eviction        which models are put to sleep, and on which device a worker goes where none has room
waiting_line    lets in what there is memory for, and tells models to leave for the rest
host_memory     what a pool asks of the host's memory; measures processes
device_memory   what a pool asks of devices, and which device a worker gets
device_moves    where the next worker of a slot goes while devices are lost
learned_memory  what versions were seen to take, kept in a file
"""
