"""The client that LitServe writes beside a server (`client.py`), as it writes it; its output as a JSON string.

litserve_client.py PORT
"""

import contextlib
import io
import json
import sys

from litserve.python_client import client_template

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    exec(compile(client_template.format(PORT=sys.argv[1]), "client.py", "exec"), {})
print(json.dumps(printed.getvalue()))
