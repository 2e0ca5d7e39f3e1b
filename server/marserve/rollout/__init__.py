"""How models come to be what somebody declares: the desired state, what leads to it, and who carries it out."""
