"""The places from which archives are read.

source           the interface: objects read in ranges, and lists of them
local            the model store, a folder
file_source      files of this machine
http             HTTP(S), each hop judged
object_store     S3, Google Cloud Storage, Azure
object_process   the process that asks one object store
object_program   its program
object_errors    its errors as sentences without secrets
object_settings  endpoint, region and credentials of an object store
aws_profiles     AWS's own files
hub              models of a hub
hub_program      the process that asks a hub
"""
