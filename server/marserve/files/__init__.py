"""What many rooms do with files. Standard library only.

regular         files that must be regular ones: opened without waiting, read within a bound
atomic          files that are there whole or not at all
leased_folders  folders that processes make once and share
locks           the kernel's locks on files
digests         SHA-256 of files, computed once for each state of a file
nearest         the known name that an unknown one may have meant
"""
