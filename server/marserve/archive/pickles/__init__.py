"""What the pickles of an archive would do, found without running them.

pickle_check    checks every pickle of an archive
pickle_program  what one pickle would do
foreign_class   the class of a whole module in a file of weights
containers      files that hold other files, unpacked piece by piece
check_budget    how much time and work a check may take
"""
