"""What runs on the other machines of a cluster: fetch an archive, unpack it, start a worker, and speak for it."""
