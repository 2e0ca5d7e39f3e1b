"""The server of this machine: start, stop, status.

start          bring a server up
start_behind   behind the command, until its models are loaded
start_dry_run  what a start would do
foreground     run it in this process
background     start it as a process of its own session
stop           have it finish, and wait for its end
status         whether it runs and is ready
pid_file       which process is the running server
"""
