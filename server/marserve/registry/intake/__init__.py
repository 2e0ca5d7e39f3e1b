"""From the word that a registration names to what a version's pool is built from.

registration       what a registration may say, and what the registry answers
intake             finds, unpacks, checks and reads the archive
scratch            the server's folder for what is extracted
startup            which models the start loads, and their names
pending_fetches    archives that are fetched and are no versions yet
installing         versions whose requirements are being installed
handler_check      whether the handler can be found
call_modes         batches, sequences, steps, or many calls at once
parallel           what `parallelType` and `torchrun` come to
effective_options  which value wins: registration, archive, `models` setting, default
plan               all of it as the plan of a version
"""
