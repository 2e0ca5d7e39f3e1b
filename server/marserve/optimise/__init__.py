"""Shows whether two builds of a model answer alike, how fast each is, and which is the best that there is.

Knows neither torch nor ONNX Runtime: builds are made and run in processes of their own.

comparison  errors, agreement and dependence on mates, and the verdict on them; pure
measures    the errors of one row's arrays
recording   what a process recorded of a model
ratio       how many times as fast one build is as another, from pairs in turns; pure
taken       what a search needs of an archive that was taken in
subject     the process that loads one archive, and answers orders
inputs      a folder of request bodies
compare     two archives beside each other, from intake to report
candidates  which builds are worth a try, and which is the best; pure
optimise    tries them, and writes the best one
proof       what an archive says of the build that it holds; pure
optimised_archive  writes such an archive
export      the model in another format, in an archive of its own
page        the report of a search as HTML; pure
background/ the key `optimise`: a server looks for a faster build by itself
"""
