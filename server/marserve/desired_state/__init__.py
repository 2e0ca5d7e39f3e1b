"""One document says which models a server has; a change is all or nothing.

document        the document, read and checked
document_place  where it lies
schema          its JSON Schema
diff            from what is there to what is wanted: the steps, in order
reconciler      carries them out, and keeps the state
history         the documents that were applied
memory_cost     what a declared version will take in memory
adoption        a document of models that no document names
policies        what calls may change: directly, not at all, or through the document
dry_runs        the dry runs of those calls
"""
