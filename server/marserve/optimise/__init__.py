"""Shows whether two builds of a model answer alike, and how fast each is. Knows neither torch nor ONNX Runtime.

comparison  errors, agreement and dependence on mates, and the verdict on them; pure
measures    the errors of one row's arrays
recording   what a process recorded of a model
ratio       how many times as fast one build is as another, from pairs in turns; pure
subject     the process that loads one archive, and answers orders
inputs      a folder of request bodies
compare     two archives beside each other, from intake to report
"""
