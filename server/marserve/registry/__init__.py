"""Which models there are: their versions, their archives, and which version answers a request."""
