"""What a client on requests and urllib3 gets of the models of `test_http.py`, as JSON.

requests_client.py INFERENCE
"""

import json
import sys

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

inference = sys.argv[1]
session = requests.Session()
# As many users have it: tried again where a load balancer would.
retry = Retry(total=3, backoff_factor=0, status_forcelist=[502, 503, 504], allowed_methods=None)
session.mount("http://", HTTPAdapter(max_retries=retry, pool_maxsize=1))
found = {}

answer = session.post(f"{inference}/predictions/total", json={"x": [1, 2, 3.5]}, headers={"X-Request-Id": "mine-1"})
found["json"] = [answer.status_code, answer.json(), answer.headers["X-Request-Id"], answer.headers["Content-Type"]]

pieces = (piece for piece in (b'{"x": [1', b", 2", b"]}"))
answer = session.post(f"{inference}/predictions/total", data=pieces, headers={"Content-Type": "application/json"})
found["chunked"] = [answer.status_code, answer.json()]

answer = session.post(f"{inference}/predictions/size", data=bytes(3_000_000))
found["bytes"] = [answer.status_code, answer.json()]

answer = session.post(
    f"{inference}/predictions/parts", files={"data": ("a.bin", b"\x00\x01"), "more": ("b.txt", "two")}
)
found["multipart"] = [answer.status_code, answer.json()]

answer = session.post(f"{inference}/predictions/total", json={"x": "one"})
found["bad_input"] = [answer.status_code, answer.json()]

answer = session.post(f"{inference}/predictions/total", data=b'{"x": [1,', headers={"Content-Type": "application/json"})
found["bad_json"] = [answer.status_code, answer.json()["message"]]

answer = session.post(f"{inference}/predictions/breaks", data=b"", headers={"X-Request-Id": "broken-1"})
found["exception"] = [answer.status_code, answer.headers["X-Request-Id"]]
found["runs"] = session.post(f"{inference}/predictions/breaks", data=b"count").json()

answer = session.post(f"{inference}/predictions/totl", json={})
found["unknown"] = [answer.status_code, answer.json()["message"]]

with session.post(f"{inference}/predictions/words", data="a b c", stream=True) as answer:
    found["lines"] = [line.decode() for line in answer.iter_lines()]

for _ in range(30):
    session.post(f"{inference}/predictions/total", json={"x": [1]}).raise_for_status()
pools = session.get_adapter(inference).poolmanager.pools
found["connections"] = [pools[key].num_connections for key in pools.keys()]  # noqa: SIM118 - it refuses to be iterated

print(json.dumps(found))
