"""Vendors' tools and libraries, asked within bounds.

tools   runs the tools, each as a process with a deadline
tables  reads what they print
nvml    NVIDIA's library, device by device
"""
