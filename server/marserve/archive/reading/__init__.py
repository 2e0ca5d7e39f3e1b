"""Unpacks archives: bounded, trusting no number and no name in them.

reader        an archive into a folder of its own
unpacked      such folders, and how a deleted file comes back
zip_records   zip files, record by record
tar_stream    gzip-compressed tar files in one pass
member_names  which names members may have
completeness  whether a file looks finished
bounded_yaml  YAML of others: plain data, bounded
"""
