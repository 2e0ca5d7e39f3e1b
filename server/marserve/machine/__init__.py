"""What the machine has (cores, memory, disk, accelerators), as plain data, and which worker gets which device."""
