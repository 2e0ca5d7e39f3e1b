"""The handler `transformers`: models of the library of that name, from a folder of the archive.

handler     reads requests, and gives each to its task
folder      finds the model's folder, and what it says of the task, of its weights and of its pooling
loading     loads model, tokenizer and image processor, without threads that would forbid a fork
tasks       the names of the tasks, with the classes that load their models and what a request may hold
encoding    tasks with one pass of the model: classes, tokens, masks, pictures, embeddings
generation  tasks that generate text, whole or in pieces
pieces      the text that each new token adds
"""
