"""What the machine has, as plain data, and which device each worker gets.

describe           cores, memory, disk, host name, accelerators
finding            which accelerators are installed
accelerators       accelerators as data
visible            which of them workers may see
devices            which worker gets which
numa               which processors are near a device
device_readings    what devices are doing now
device_watch       the latest readings
vendors/           vendors' tools and libraries, asked within bounds
own_thread         threads for calls that may hang in a driver
threads            threads for calls that block
hanging            the call in which a thread hangs
start_watch        the call that a start waits for
limits             limits on processes, threads and files
measuring_program  the operator's own measuring program
"""
