"""Model archives: read safely, checked before anything in them is opened, written the same way twice.

reading/      unpacked within bounds, never outside of its folder
contents/     what an archive says of itself
pickles/      what a pickle would do, found without doing it
checkpoints/  what a checkpoint holds, from its headers alone
writing/      archives made
"""
