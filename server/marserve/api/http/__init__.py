"""One HTTP/1.1 connection: from its bytes to a request of the data plane, and the answer back.

connection        the connection: limits, and the short path for inference
connections       the open connections of listeners, looked at once a second
listener          what the connections of one address share
exchange          one inference request and its answer
inference         which target is an inference route
instances         the instances of one request of KServe's V1, each an item of a batch
request_head      the header, checked
request_body      from a body to the inputs that a handler sees
response_headers  the headers every answer has
large_answers     answers fed to slow clients, from memory or disk
slowness          the writing side: what waits for a slow client
unread            whether bytes came that the loop has not read
stream_errors     how a stream says that it breaks off
asgi_run          one request of any other route, in the application
"""
