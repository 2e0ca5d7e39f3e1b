"""File operations of several rooms. Standard library only.

regular         opens only regular files, without waiting, and reads within a bound
atomic          writes files and folders whole or not at all
leased_folders  folders that processes make once and share
locks           the kernel's locks on files
below           where a name leads, and whether that lies in its folder
digests         SHA-256 of files, computed once for each state of a file
nearest         the known name that an unknown one may have meant
"""
