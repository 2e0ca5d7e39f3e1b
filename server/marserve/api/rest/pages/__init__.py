"""What a browser gets: `GET /`, `/openapi.json`, the page at `/docs` with its data, and the dashboard.

router    the routes
accept    whether a client would rather have HTML or JSON
files     the files of the pages, and the headers that keep it from running anything else
static/   the page at `/docs`: docs.html, app.js and what it imports, app.css; dashboard/ has the dashboard;
          vendored/ has other people's code with its licence
"""
