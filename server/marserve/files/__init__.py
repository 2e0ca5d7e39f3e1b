"""What many rooms do with files. Standard library only.

regular  files that must be regular ones: opened without waiting, read within a bound
digests  SHA-256 of files, computed once for each state of a file
nearest  the known name that an unknown one may have meant
"""
