"""From a registration to the plan that a version's pool is built from.

registration       the parameters of a registration, and the registry's answers
intake             finds, unpacks, checks and reads the archive
checkpoints/       weights that a configuration names apart from the archive's model
uploads            takes uploaded archives into the store, checked, whole or not at all
scratch            the server's folder for extracted archives
startup            which models the start loads, and their names
pending_fetches    archives that are being fetched and unpacked
installing         versions whose requirements are being installed
worker_program     workers in another language
handler_check      whether the handler can be found
call_modes         batches, sequences, steps, or many calls at once
parallel           what `parallel`, `parallelType` and `torchrun` mean on this server
effective_options  which value wins: registration, archive, `models` setting, default
drawn_samples      inputs that fit a declaration, to warm up and check with
plan               makes the plan of a version
"""
