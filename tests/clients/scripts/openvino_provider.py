"""What a model gives in `onnxruntime-openvino`, by the runtime of marserve's workers, as JSON.

openvino_provider.py MODEL.onnx ROWS.json
"""

import json
import sys

import numpy

from marserve_handlers.runtimes.onnx import open_session, run

rows = numpy.array(json.loads(sys.argv[2]), numpy.float32)
found = {}
for name, providers in (("openvino", ["OpenVINO", "CPU"]), ("cpu", ["CPU"])):
    session = open_session(sys.argv[1], options={"providers": providers, "fallback": False})
    found[name] = {"providers": session.get_providers(), "seen": run(session, rows).tolist()}
print(json.dumps(found))
