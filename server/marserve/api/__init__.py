"""What clients speak to: one file a surface, which translates its encoding and no more."""
