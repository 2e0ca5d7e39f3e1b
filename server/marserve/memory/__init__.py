"""Memory of the machine and of its devices: which loads and workers there is room for, and what makes room.

admission         the host's books: what holds how much, what waits, what is about to leave
eviction          which models are put to sleep so that another can be loaded
residency         keeps the host's budget, lets loads begin, puts models to sleep
learned_memory    what versions were seen to take, kept in a file
device_admission  whether a worker fits on a device
device_eviction   which device a worker gets where none has room, and what sleeps for it
device_line       what waits for a device's memory, and what leaves for it
device_moves      where the next worker of a slot goes while devices are lost
device_room       has a worker begin only on a device with memory for it
"""
