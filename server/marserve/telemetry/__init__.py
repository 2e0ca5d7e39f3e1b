"""What the server process says about itself: metrics, logs, the access log. Workers only send numbers and lines."""
