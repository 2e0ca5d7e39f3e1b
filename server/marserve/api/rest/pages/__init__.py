"""What a browser gets: `GET /`, `/openapi.json`, and the page at `/docs` with its data.

router    the routes
accept    whether a client would rather have HTML or JSON
files     the files of the page, and the headers that keep it from running anything else
static/   the page: docs.html, app.js and what it imports, app.css; vendored/ has other people's code with its licence
"""
