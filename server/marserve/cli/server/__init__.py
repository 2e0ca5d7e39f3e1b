"""The server of this machine: start, stop, status, logs.

sample_request  a request that it takes, as a `curl` line
start          bring a server up
start_block    what a start shows on a terminal
start_behind   start it in the background, and wait until its models are loaded
start_dry_run  say what a start would do
foreground     run it in this process
background     start it as a process of its own session
stop           end it after its accepted requests
status         whether it runs and is ready
logs           what its logs say, and how much it logs
pid_file       the file with the process id of the running server
"""
