"""One document says which models a server has; a change is all or nothing.

document        reads and checks the document
document_place  the file or object that holds the document
schema          its JSON Schema
diff            the steps from the registered models to the wanted ones, in order
reconciler      carries the steps out, and keeps the state
history         the documents that were applied
memory_cost     the memory that a declared version will take
adoption        a document of models that no document names
policies        whether calls change models directly, through the document, or not at all
dry_runs        the dry runs of those calls
"""
