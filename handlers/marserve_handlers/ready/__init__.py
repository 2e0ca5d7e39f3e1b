"""Handlers for models of other libraries: named in an archive, they need no code of the author's.

handler        what they share: options, items, batches
options        the keys of `handler` in a model's configuration, checked at load
items          the items of a batch's rows, and the answers put together again
tables         rows of numbers for models of features
packages       imports an optional library, and says how to install it
model_file     finds the file that holds the model
trusted_pickle opens pickles of archives that the operator trusts
sklearn        scikit-learn: skops, ONNX, pickles by trust
xgboost        XGBoost: .json, .ubj
lightgbm       LightGBM: .txt
transformers/  transformers: a folder with config.json and safetensors
"""
