#!/usr/bin/env python3
"""Play recorded request/response contracts against a model server.

    play.py --cmd 'torchserve' --fixtures FIXTURES [--only REGEX] [--quirks] [--jobs N] [--seconds N] [--json OUT]

Standard library only; gRPC cases need grpcio and protobuf and are skipped without them.
A *recording* is JSON: how to start the server, then a list of cases in order.  Every case
holds what to do and what the reference server answered.  For each recording a server is
started afresh, in a working directory of its own, as

    CMD --start --foreground --ts-config config.properties --model-store store [more options]

What differs from run to run is masked the same way in both answers before they are compared.
The last line is "N passed, N failed"; the exit status is 1 when anything failed.
"""
import argparse
import base64
import concurrent.futures
import glob
import http.client
import http.server
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
HEX32 = re.compile(r"\b[0-9a-f]{32}\b")
ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
# headers that carry no contract of their own in the default comparison
LAX_HEADERS = {"content-length", "connection", "date", "server", "transfer-encoding", "keep-alive"}
HOST = socket.gethostname()
JAVA = re.compile(r"\b(java|javax|io\.netty|com\.google|org\.yaml|sun)\.|Cannot invoke |BEGIN_OBJECT|line \d+ column \d+ path")


# --------------------------------------------------------------------------- masking
class Masker:
    """Turns what differs from run to run into fixed words."""

    def __init__(self, server):
        self.server = server

    def text(self, s):
        srv = self.server
        for path, word in srv.paths():
            if path:
                s = s.replace(path, word)
        s = UUID.sub("<UUID>", s)
        s = HEX32.sub("<HEX32>", s)
        s = ISO.sub("<TIME>", s)
        for name, port in srv.ports.items():
            s = re.sub(r"(?<=[:=])%d\b" % port, "<PORT:%s>" % name, s)
        s = re.sub(r"\.ts\.sock\.\d+", ".ts.sock.<N>", s)
        s = re.sub(r"(?i)(?<=hostname=\")%s(?=\")" % re.escape(HOST), "<HOST>", s)
        s = re.sub(r"(?i)(?<=hostname:)%s\b" % re.escape(HOST), "<HOST>", s)
        return s

    def json(self, v, path=()):
        if isinstance(v, dict):
            out = {}
            for k, x in v.items():
                here = path + (k,)
                if k in ("pid", "memoryUsage", "startTime", "gpuUsage") or (k == "id" and "workers" in path):
                    out[k] = "<%s>" % k
                elif k == "server_version" or (k == "version" and "name" in v and not path):
                    out[k] = "<VERSION>"
                else:
                    out[self.text(k)] = self.json(x, here)
            return out
        if isinstance(v, list):
            return [self.json(x, path) for x in v]
        if isinstance(v, str):
            return self.text(v)
        return v


def layout_of(text, value):
    try:
        if text == json.dumps(value, indent=2) + "\n":
            return "indent2+newline"
        if text == json.dumps(value, indent=2):
            return "indent2"
        if text == json.dumps(value, separators=(",", ":")):
            return "compact"
        if text == json.dumps(value):
            return "python"
    except ValueError:
        pass
    return "other"


def prune_openapi(doc):
    """API descriptions: keep structure (paths, methods, parameter names, status codes)."""
    def walk(v):
        if isinstance(v, dict):
            return {k: ("<TEXT>" if isinstance(x, str) and k in ("description", "title", "summary") else walk(x)) for k, x in v.items()}
        if isinstance(v, list):
            return [walk(x) for x in v]
        return v

    doc = walk(doc)
    if isinstance(doc.get("info"), dict):
        doc["info"].pop("version", None)
    return doc


def view_body(raw, ctype, masker, view=None):
    if view == "prometheus":
        return {"prometheus": prometheus(raw.decode("utf-8", "replace"), masker)}
    if view == "size":
        return {"size": len(raw)}
    if view == "torch":
        return {"zip": raw[:2] == b"PK", "size_class": len(raw) // 1024}
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}
    stripped = text.strip()
    if stripped[:1] in ("{", "[") or "json" in (ctype or ""):
        try:
            value = json.loads(text)
        except ValueError:
            pass
        else:
            if isinstance(value, dict) and "openapi" in value:
                return {"json": prune_openapi(value)}
            return {"json": masker.json(value), "layout": layout_of(text, value)}
    return {"text": masker.text(text)}


SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})? (\S+)( \d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def prometheus(text, masker):
    families = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            families.setdefault(name, {"type": kind, "samples": []})["type"] = kind
        elif line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            families.setdefault(name, {"type": None, "samples": []})["help"] = True
        elif line and not line.startswith("#"):
            m = SAMPLE.match(line)
            if not m:
                families.setdefault("<unparsed>", {"type": None, "samples": []})["samples"].append(line)
                continue
            name = m.group(1)
            labels = {k: masker.text(v) for k, v in LABEL.findall(m.group(2) or "")}
            for key in labels:
                if key.lower() in ("hostname",) or labels[key] == HOST:
                    labels[key] = "<HOST>"
                if key in ("WorkerName",):
                    labels[key] = re.sub(r"\d+", "<N>", labels[key])
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            family = families[base] if base in families else families.setdefault(name, {"type": None, "samples": []})
            family["samples"].append({"name": name, "labels": labels, "value": float(m.group(3))})
    return families


# --------------------------------------------------------------------------- gRPC without .proto files
def grpc_messages():
    """Message classes of the three services, built from a compact table.

    Only names, numbers and types are needed to talk to a server."""
    from google.protobuf import descriptor_pb2 as d
    from google.protobuf import descriptor_pool, message_factory

    F = d.FieldDescriptorProto
    kinds = {"string": F.TYPE_STRING, "bytes": F.TYPE_BYTES, "bool": F.TYPE_BOOL, "int32": F.TYPE_INT32,
             "int64": F.TYPE_INT64, "uint32": F.TYPE_UINT32, "uint64": F.TYPE_UINT64, "float": F.TYPE_FLOAT, "double": F.TYPE_DOUBLE}
    pool = descriptor_pool.DescriptorPool()

    def build(fname, package, table, deps=()):
        f = d.FileDescriptorProto(name=fname, package=package, syntax="proto3", dependency=list(deps))

        def add(parent, name, fields, prefix=""):
            m = parent.add(name=name)
            prefix = prefix + "." + name
            for spec in fields:
                if isinstance(spec, tuple):  # nested message
                    add(m.nested_type, spec[0], spec[1], prefix)
                    continue
                num, label, typ, fld = re.match(r"(\d+) ?(\*|oneof)? ?(\S+) (\w+)", spec).groups()
                if typ.startswith("map:"):
                    val = typ[4:]
                    entry = "".join(p.capitalize() for p in fld.split("_")) + "Entry"
                    e = m.nested_type.add(name=entry)
                    e.options.map_entry = True
                    e.field.add(name="key", number=1, label=F.LABEL_OPTIONAL, type=F.TYPE_STRING)
                    v = e.field.add(name="value", number=2, label=F.LABEL_OPTIONAL)
                    if val in kinds:
                        v.type = kinds[val]
                    else:
                        v.type, v.type_name = F.TYPE_MESSAGE, "." + package + "." + val
                    x = m.field.add(name=fld, number=int(num), label=F.LABEL_REPEATED, type=F.TYPE_MESSAGE)
                    x.type_name = ".%s%s.%s" % (package, prefix, entry)
                    continue
                x = m.field.add(name=fld, number=int(num), label=F.LABEL_REPEATED if label == "*" else F.LABEL_OPTIONAL)
                if label == "oneof":
                    if not m.oneof_decl:
                        m.oneof_decl.add(name="choice")
                    x.oneof_index = 0
                if typ in kinds:
                    x.type = kinds[typ]
                else:
                    x.type = F.TYPE_MESSAGE
                    x.type_name = typ if typ.startswith(".google") else "." + package + "." + typ
            return m

        for name, fields in table.items():
            add(f.message_type, name, fields)
        pool.Add(f)

    pool.Add(d.FileDescriptorProto(name="google/protobuf/empty.proto", package="google.protobuf", syntax="proto3",
                                   message_type=[d.DescriptorProto(name="Empty")]))
    inf = "org.pytorch.serve.grpc.inference"
    build("inf.proto", inf, {
        "PredictionsRequest": ["1 string model_name", "2 string model_version", "3 map:bytes input", "4 string sequence_id"],
        "RpcStatus": ["1 int32 code", "2 string message"],
        "PredictionResponse": ["1 bytes prediction", "2 string sequence_id", "3 RpcStatus status"],
        "TorchServeHealthResponse": ["1 string health"]}, ["google/protobuf/empty.proto"])
    mgm = "org.pytorch.serve.grpc.management"
    build("mgm.proto", mgm, {
        "ManagementResponse": ["1 string msg"],
        "DescribeModelRequest": ["1 string model_name", "2 string model_version", "3 bool customized"],
        "ListModelsRequest": ["1 int32 limit", "2 int32 next_page_token"],
        "RegisterModelRequest": ["1 int32 batch_size", "2 string handler", "3 int32 initial_workers", "4 int32 max_batch_delay",
                                 "5 string model_name", "6 int32 response_timeout", "7 string runtime", "8 bool synchronous",
                                 "9 string url", "10 bool s3_sse_kms", "11 int32 startup_timeout"],
        "ScaleWorkerRequest": ["1 string model_name", "2 string model_version", "3 int32 max_worker", "4 int32 min_worker",
                               "5 int32 number_gpu", "6 bool synchronous", "7 int32 timeout"],
        "SetDefaultRequest": ["1 string model_name", "2 string model_version"],
        "UnregisterModelRequest": ["1 string model_name", "2 string model_version"]})
    oip = "org.pytorch.serve.grpc.openinference"
    tensor = ["1 string name", "2 string datatype", "3 * int64 shape"]
    build("oip.proto", oip, {
        "ServerLiveRequest": [], "ServerLiveResponse": ["1 bool live"],
        "ServerReadyRequest": [], "ServerReadyResponse": ["1 bool ready"],
        "ModelReadyRequest": ["1 string name", "2 string version"], "ModelReadyResponse": ["1 bool ready"],
        "ServerMetadataRequest": [], "ServerMetadataResponse": ["1 string name", "2 string version", "3 * string extensions"],
        "ModelMetadataRequest": ["1 string name", "2 string version"],
        "ModelMetadataResponse": [("TensorMetadata", tensor), "1 string name", "2 * string versions", "3 string platform",
                                  "4 * ModelMetadataResponse.TensorMetadata inputs", "5 * ModelMetadataResponse.TensorMetadata outputs"],
        "InferParameter": ["1 oneof bool bool_param", "2 oneof int64 int64_param", "3 oneof string string_param"],
        "InferTensorContents": ["1 * bool bool_contents", "2 * int32 int_contents", "3 * int64 int64_contents", "4 * uint32 uint_contents",
                                "5 * uint64 uint64_contents", "6 * float fp32_contents", "7 * double fp64_contents", "8 * bytes bytes_contents"],
        "ModelInferRequest": [("InferInputTensor", tensor + ["4 map:InferParameter parameters", "5 InferTensorContents contents"]) ,
                              ("InferRequestedOutputTensor", ["1 string name"]),
                              "1 string model_name", "2 string model_version", "3 string id", "4 map:InferParameter parameters",
                              "5 * ModelInferRequest.InferInputTensor inputs", "6 * ModelInferRequest.InferRequestedOutputTensor outputs", "7 * bytes raw_input_contents"],
        "ModelInferResponse": [("InferOutputTensor", tensor + ["5 InferTensorContents contents"]),
                               "1 string model_name", "2 string model_version", "3 string id", "4 map:InferParameter parameters",
                               "5 * ModelInferResponse.InferOutputTensor outputs", "6 * bytes raw_output_contents"]})

    def get(full):
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(full))

    services = {
        "inference": (inf + ".InferenceAPIsService", {
            "Ping": ("google.protobuf.Empty", inf + ".TorchServeHealthResponse", "uu"),
            "Predictions": (inf + ".PredictionsRequest", inf + ".PredictionResponse", "uu"),
            "StreamPredictions": (inf + ".PredictionsRequest", inf + ".PredictionResponse", "us"),
            "StreamPredictions2": (inf + ".PredictionsRequest", inf + ".PredictionResponse", "ss"),
            "NoSuchCall": (inf + ".PredictionsRequest", inf + ".PredictionResponse", "uu")}),
        "management": (mgm + ".ManagementAPIsService", {
            n: (mgm + "." + n + "Request", mgm + ".ManagementResponse", "uu")
            for n in ("DescribeModel", "ListModels", "RegisterModel", "ScaleWorker", "SetDefault", "UnregisterModel")}),
        "oip": (oip + ".GRPCInferenceService", {
            n: (oip + "." + n + "Request", oip + "." + n + "Response", "uu")
            for n in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")}),
    }
    return get, services


_GRPC = None


def grpc_kit():
    global _GRPC
    if _GRPC is None:
        try:
            import grpc  # noqa: F401
            from google.protobuf import json_format  # noqa: F401

            _GRPC = grpc_messages()
        except ImportError:
            _GRPC = False
    return _GRPC


# --------------------------------------------------------------------------- the server under test
def free_ports(n):
    """n unused ports below the range that the system hands to outgoing connections."""
    picked = []
    dice = random.Random()
    while len(picked) < n:
        port = dice.randrange(12000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in picked:
            picked.append(port)
    return picked


PORTS = ("inference", "management", "metrics", "grpc_inference", "grpc_management", "files")


class Server:
    """A server that this process starts, once or several times, in one working directory."""

    def __init__(self, cmd, fixtures, keep=False):
        self.cmd, self.fixtures, self.keep = cmd, fixtures, keep
        self.ports = {}
        self.proc = None
        self.work = None
        self.file_server = None
        self.keys = {}
        self.marks = {}
        self.deadline = None

    def expired(self):
        return self.deadline is not None and time.time() > self.deadline

    def nap(self, seconds):
        if self.deadline is not None:
            seconds = min(seconds, max(0.0, self.deadline - time.time()) + 0.01)
        time.sleep(seconds)

    # ---- life cycle
    def prepare(self, spec):
        self.spec = spec
        self.marks = {}
        self.work = tempfile.mkdtemp(prefix="ctk-", dir=os.environ.get("CONTRACT_TMP"))
        self.ports = dict(zip(PORTS, free_ports(len(PORTS))))
        store = os.path.join(self.work, "store")
        for d in (store, os.path.join(self.work, "tmp"), os.path.join(self.work, "wfstore")):
            os.makedirs(d)
        for name in spec.get("store", []):
            src = os.path.join(self.fixtures, name)
            if os.path.isdir(src):
                shutil.copytree(src, os.path.join(store, name))
            elif os.path.exists(src):
                shutil.copy(src, os.path.join(store, name))
        for name in spec.get("wfstore", []):
            src = os.path.join(self.fixtures, name)
            if os.path.exists(src):
                shutil.copy(src, os.path.join(self.work, "wfstore", name))
        if spec.get("tls"):
            make_certificate(self.work)
        for name, text in (spec.get("files") or {}).items():
            full = os.path.join(self.work, name)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "w") as fh:
                fh.write(self.fill(text))
        if spec.get("serve_files"):
            self.file_server = FileServer(self.fixtures, self.ports["files"])

    def fill(self, text):
        """Replaces {work}, {store}, {port:inference} and the like."""
        if not isinstance(text, str):
            return text
        text = text.replace("{work}", self.work or "").replace("{store}", os.path.join(self.work or "", "store"))
        text = re.sub(r"\{port:(\w+)\}", lambda m: str(self.ports.get(m.group(1), 0)), text)
        text = re.sub(r"\{key:(\w+)\}", lambda m: self.token(m.group(1)), text)
        text = re.sub(r"\{mark:(\w+)\}", lambda m: str(self.marks.get(m.group(1), "")), text)
        return text

    def token(self, name):
        """Keys of the token authorization file in the server's working directory."""
        if name.startswith("old_"):
            return self.keys.get(name[4:], "missing")
        try:
            with open(os.path.join(self.work, "key_file.json")) as fh:
                doc = json.load(fh)
            return doc[name]["key"]
        except (OSError, ValueError, KeyError):
            return "missing"

    def environment(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("TS_")}
        tmp = os.path.join(self.work, "tmp")
        env.update({"TEMP": tmp, "TMPDIR": tmp})
        for k, v in (self.spec.get("env") or {}).items():
            env[k] = self.fill(v)
        return env

    def write_config(self):
        spec = self.spec
        lines = {}
        if not spec.get("no_addresses"):
            scheme = "https" if spec.get("tls") else "http"
            lines = {
                "inference_address": scheme + "://127.0.0.1:{port:inference}",
                "management_address": scheme + "://127.0.0.1:{port:management}",
                "metrics_address": scheme + "://127.0.0.1:{port:metrics}",
                "grpc_inference_port": "{port:grpc_inference}",
                "grpc_management_port": "{port:grpc_management}",
            }
        lines.update(spec.get("config") or {})
        with open(os.path.join(self.work, "config.properties"), "w") as fh:
            for k, v in lines.items():
                if v is not None:
                    fh.write("%s=%s\n" % (k, self.fill(v)))

    def start(self, extra_args=None, wait=True):
        spec = self.spec
        self.write_config()
        args = shlex.split(self.cmd) + ["--start", "--foreground"]
        if not spec.get("no_config_file"):
            args += ["--ts-config", "config.properties"]
        if not spec.get("no_store"):
            args += ["--model-store", "store"]
        args += [self.fill(a) for a in (extra_args if extra_args is not None else spec.get("args", ["--ncs"]))]
        self.log = open(os.path.join(self.work, "console.log"), "ab")
        self.proc = subprocess.Popen(args, cwd=self.work, env=self.environment(), stdout=self.log, stderr=subprocess.STDOUT,
                                     stdin=subprocess.DEVNULL, start_new_session=True)
        return self.wait_up() if wait else True

    def wait_up(self, limit=90):
        end = time.time() + limit
        while time.time() < end:
            if self.proc.poll() is not None:
                time.sleep(0.2)
                return False
            try:
                if self.spec.get("unix"):
                    ok = self.http({"to": "inference", "method": "GET", "path": "/ping"}, timeout=3).get("status", 0) > 0
                else:
                    ok = True
                    for name in self.spec.get("wait_for", ["inference", "management"]):
                        with socket.create_connection(("127.0.0.1", self.ports[name]), 1):
                            pass
                if ok:
                    time.sleep(0.3)
                    return True
            except OSError:
                time.sleep(0.2)
        return False

    def stop(self, polite=True):
        if self.proc is None:
            return
        if polite and not self.expired():
            try:
                subprocess.run(shlex.split(self.cmd) + ["--stop"], cwd=self.work, env=self.environment(), stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
            except (OSError, subprocess.SubprocessError):
                pass
            self.wait_gone(15)
        for sig, grace in ((signal.SIGKILL, 1),) if self.expired() else ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            if not self.group_alive():
                break
            try:
                os.killpg(self.proc.pid, sig)  # only the session that we started
            except ProcessLookupError:
                break
            self.wait_gone(grace)
        try:
            self.proc.wait(5)
        except subprocess.TimeoutExpired:
            pass
        self.log.close()
        self.proc = None

    def abort(self):
        """Ends whatever still runs, at once (used when time is up)."""
        proc = self.proc
        if proc is not None:
            try:
                os.killpg(proc.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def group_alive(self):
        self.proc.poll()
        try:
            os.killpg(self.proc.pid, 0)
            return True
        except (ProcessLookupError, PermissionError):
            return False

    def wait_gone(self, limit):
        end = time.time() + limit
        while time.time() < end and self.group_alive():
            time.sleep(0.1)

    def finish(self):
        self.stop()
        if self.file_server:
            self.file_server.close()
            self.file_server = None
        if self.work and not self.keep:
            shutil.rmtree(self.work, ignore_errors=True)

    def console(self):
        try:
            with open(os.path.join(self.work, "console.log"), errors="replace") as fh:
                return fh.read()[-1500:]
        except OSError:
            return ""

    def paths(self):
        return [(os.path.join(self.work, "store") if self.work else "", "<STORE>"),
                (os.path.realpath(self.work) if self.work else "", "<WORK>"), (self.work or "", "<WORK>")]

    # ---- requests
    def connection(self, to, timeout):
        spec = self.spec if hasattr(self, "spec") else {}
        if spec.get("unix"):
            return UnixConnection(os.path.join(self.work, to + ".sock"), timeout)
        if spec.get("tls"):
            return http.client.HTTPSConnection("127.0.0.1", self.ports[to], timeout=timeout, context=ssl._create_unverified_context())
        return http.client.HTTPConnection("127.0.0.1", self.ports[to], timeout=timeout)

    def body_of(self, body):
        """-> (bytes or None, content type or None)"""
        if body is None:
            return None, None
        if "text" in body:
            return self.fill(body["text"]).encode("utf-8"), None
        if "json" in body:
            return json.dumps(json.loads(self.fill(json.dumps(body["json"])))).encode(), "application/json"
        if "base64" in body:
            return base64.b64decode(body["base64"]), None
        if "zeros" in body:
            return b"0" * body["zeros"], None
        if "file" in body:
            return self.data_file(body["file"]), None
        if "form" in body:
            return urllib.parse.urlencode(body["form"]).encode(), "application/x-www-form-urlencoded"
        if "multipart" in body:
            edge = "----contract-boundary"
            out = b""
            for part in body["multipart"]:
                head = 'Content-Disposition: form-data; name="%s"' % part["name"]
                if "filename" in part:
                    head += '; filename="%s"' % part["filename"]
                head += "\r\n"
                if "type" in part:
                    head += "Content-Type: %s\r\n" % part["type"]
                raw, _ = self.body_of({k: v for k, v in part.items() if k in ("text", "json", "base64", "file")})
                out += b"--" + edge.encode() + b"\r\n" + head.encode() + b"\r\n" + raw + b"\r\n"
            return out + b"--" + edge.encode() + b"--\r\n", "multipart/form-data; boundary=" + edge
        raise ValueError("body? %r" % body)

    def data_file(self, name):
        with open(os.path.join(os.environ.get("CONTRACT_DATA", ""), name), "rb") as fh:
            return fh.read()

    def http(self, req, timeout=None, masker=None, conn=None):
        masker = masker or Masker(self)
        timeout = timeout or req.get("timeout", 60)
        raw, ctype = self.body_of(req.get("body"))
        headers = {k: self.fill(v) for k, v in (req.get("headers") or {}).items()}
        if ctype and not any(k.lower() == "content-type" for k in headers):
            headers["Content-Type"] = ctype
        own = conn is None
        conn = conn or self.connection(req["to"], timeout)
        began = time.time()
        chunks = []
        resp = None
        try:
            if req.get("chunked"):
                parts = [raw[i:i + 7] for i in range(0, len(raw), 7)]
                conn.request(req["method"], self.fill(req["path"]), body=iter(parts), headers=dict(headers, **{"Transfer-Encoding": "chunked"}), encode_chunked=True)
            else:
                conn.request(req["method"], self.fill(req["path"]), body=raw, headers=headers)
            resp = conn.getresponse()
            if req.get("view") == "stream":
                first = None
                while True:
                    piece = resp.read1(65536)
                    if not piece:
                        break
                    if first is None:
                        first = time.time()
                    chunks.append(piece)
                data = b"".join(chunks)
            else:
                data = resp.read()
        except (OSError, http.client.HTTPException) as err:
            if resp is not None:
                return {"status": resp.status, "broken": True, "after": time.time() - began}
            return {"failed": "no answer", "after": time.time() - began}
        finally:
            if own:
                conn.close()
        got = {}
        for k, v in resp.getheaders():
            k = k.lower()
            got[k] = masker.text(v)
        result = {"status": resp.status, "reason": resp.reason, "http": {10: "1.0", 11: "1.1"}.get(resp.version, str(resp.version)), "headers": got}
        if req.get("view") == "stream":
            result["body"] = view_body(data, got.get("content-type"), masker)
            result["incremental"] = bool(chunks) and (time.time() - first) > req.get("spread", 0.3)
        elif req["method"] != "HEAD":
            result["body"] = view_body(data, got.get("content-type"), masker, req.get("view"))
            if "text" in result["body"]:
                for pattern, word in req.get("sub", []):
                    result["body"]["text"] = re.sub(pattern, word, result["body"]["text"])
                if req.get("sort_lines"):
                    result["body"]["text"] = "\n".join(sorted(result["body"]["text"].splitlines()))
        result["after"] = time.time() - began
        return result

    def raw(self, case):
        """Bytes on a bare socket; the answer is cut into status line, headers and body."""
        masker = Masker(self)
        with socket.create_connection(("127.0.0.1", self.ports[case["to"]]), 10) as s:
            s.sendall(self.fill(case["send"]).encode("latin-1"))
            if case.get("half_close"):
                s.shutdown(socket.SHUT_WR)
            s.settimeout(case.get("timeout", 3))
            data = b""
            try:
                while True:
                    piece = s.recv(65536)
                    if not piece:
                        closed = True
                        break
                    data += piece
            except socket.timeout:
                closed = False
            except ConnectionError:
                closed = True
        text = masker.text(data.decode("utf-8", "replace"))
        heads = re.findall(r"^HTTP/1\.[01] (\d+)", text, re.M)
        return {"statuses": [int(h) for h in heads], "closed": closed, "text": text if case.get("keep_text") else None}

    def grpc(self, case):
        kit = grpc_kit()
        if not kit:
            return {"skipped": "grpcio or protobuf is missing"}
        import grpc
        from google.protobuf import json_format

        get, services = kit
        service, methods = services[case["service"]]
        req_t, resp_t, mode = methods[case["method"]]
        port = self.ports["grpc_management" if case["service"] == "management" else "grpc_inference"]
        masker = Masker(self)

        def message(doc):
            return json_format.ParseDict(json.loads(self.fill(json.dumps(doc))), get(req_t)())

        target = "127.0.0.1:%d" % port
        if case.get("tls"):
            pem = ssl.get_server_certificate(("127.0.0.1", port)).encode()
            channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(pem), [("grpc.ssl_target_name_override", "localhost")])
        else:
            channel = grpc.insecure_channel(target)
        meta = [(k, self.fill(v)) for k, v in (case.get("metadata") or {}).items()]
        full = "/%s/%s" % (service, case["method"])
        kw = dict(request_serializer=lambda m: m.SerializeToString(), response_deserializer=get(resp_t).FromString)
        out = []
        stamps = []
        try:
            if mode == "uu":
                out.append(channel.unary_unary(full, **kw)(message(case.get("message", {})), timeout=case.get("timeout", 60), metadata=meta))
            else:
                if mode == "us":
                    it = channel.unary_stream(full, **kw)(message(case.get("message", {})), timeout=case.get("timeout", 60), metadata=meta)
                else:
                    def feed():
                        # keeps its half open until every answer is in (or 8 seconds went by)
                        for m in case["messages"]:
                            yield message(m)
                            time.sleep(case.get("gap", 0))
                        end = time.time() + 8
                        while len(out) < len(case["messages"]) and time.time() < end:
                            time.sleep(0.05)

                    it = channel.stream_stream(full, **kw)(feed(), timeout=case.get("timeout", 60), metadata=meta)
                for r in it:
                    out.append(r)
                    stamps.append(time.time())
            code, details = "OK", ""
        except grpc.RpcError as err:
            code, details = err.code().name, err.details()
        finally:
            channel.close()
        answers = []
        for r in out:
            doc = json_format.MessageToDict(r, preserving_proto_field_name=True)
            if "prediction" in doc:
                doc = dict(doc, prediction=view_body(base64.b64decode(doc["prediction"]), None, masker))
            elif "msg" in doc:
                doc = {"msg": view_body(doc["msg"].encode(), None, masker)}
            else:
                doc = masker.json(doc)
            answers.append(doc)
        result = {"code": code, "details": masker.text(details or ""), "answers": answers}
        if mode != "uu" and len(stamps) > 1:
            result["incremental"] = stamps[-1] - stamps[0] > case.get("spread", 0.3)
        return result

    # ---- steps
    def run(self, case):
        do = case.get("do", "http")
        if case.get("before"):
            self.nap(case["before"])
        if case.get("settle"):  # what is described may still be on its way
            end = time.time() + case["settle"]
            plain = {k: v for k, v in case.items() if k not in ("settle", "before")}
            while True:
                r = self.run(plain)
                if time.time() > end or self.expired() or not re.search(r'"status": "(?!READY)[A-Z_]+"', json.dumps(r)):
                    return r
                time.sleep(0.2)
        if do == "http":
            r = self.http(case)
            return self.timed(case, r)
        if do == "sleep":
            self.nap(case["seconds"])
            return {"done": True}
        if do == "poll":
            return self.poll(case)
        if do == "parallel":
            with concurrent.futures.ThreadPoolExecutor(len(case["requests"])) as pool:
                def one(req):
                    time.sleep(req.get("delay", 0))
                    return self.timed(req, self.http(req))
                results = list(pool.map(one, case["requests"]))
            if case.get("unordered"):
                results.sort(key=lambda r: json.dumps([r.get("status"), r.get("failed"), r.get("body")], sort_keys=True))
            return {"results": results}
        if do == "keepalive":
            conn = self.connection(case["requests"][0]["to"], 30)
            results = [self.timed(r, self.http(r, conn=conn)) for r in case["requests"]]
            conn.close()
            return {"results": results}
        if do == "raw":
            return self.raw(case)
        if do == "grpc":
            return self.grpc(case)
        if do == "remember_keys":
            self.keys = {n: self.token(n) for n in ("management", "inference", "API")}
            return {"found": sorted(k for k, v in self.keys.items() if v != "missing")}
        if do == "stop":
            self.stop()
            return {"done": True}
        if do == "start":
            if case.get("config") is not None:
                self.spec = dict(self.spec, config=dict(self.spec.get("config") or {}, **case["config"]))
            if case.get("no_config_file"):
                self.spec = dict(self.spec, no_config_file=True)
            if case.get("env") is not None:
                self.spec = dict(self.spec, env=dict(self.spec.get("env") or {}, **case["env"]))
            up = self.start(case.get("args"))
            return {"up": up} if up else {"up": up, "console": self.console()}
        if do == "files":
            return self.files(case)
        if do == "log":
            return self.log_lines(case)
        if do == "cli":
            return self.cli(case)
        if do == "write":
            full = os.path.join(self.work, case["file"])
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "w") as fh:
                fh.write(self.fill(case["text"]))
            return {"done": True}
        raise ValueError(do)

    @staticmethod
    def timed(case, r):
        took = r.pop("after", None)
        limits = case.get("timing")
        if limits and took is not None:
            low, high = limits
            r["timing"] = "too fast" if took < low else "too slow" if took > high else "as expected"
        return r

    def poll(self, case):
        end = time.time() + case.get("limit", 40)
        last = None
        while True:
            last = self.http(case["request"])
            last.pop("after", None)
            if self.reached(case["until"], last):
                return {"reached": True, "last": last}
            if time.time() > end or self.expired():
                return {"reached": False, "last": last}
            time.sleep(case.get("every", 0.25))

    @staticmethod
    def reached(until, r):
        if "status" in until and r.get("status") != until["status"]:
            return False
        if "contains" in until and until["contains"] not in json.dumps(r.get("body")):
            return False
        if "lacks" in until and until["lacks"] in json.dumps(r.get("body")):
            return False
        if "workers" in until:
            try:
                workers = [w for m in r["body"]["json"] for w in m.get("workers", [])]
            except (KeyError, TypeError, AttributeError):
                return False
            if len(workers) != until["workers"] or any(w.get("status") != "READY" for w in workers):
                return False
        return True

    def files(self, case):
        masker = Masker(self)
        found = {}
        for full in sorted(glob.glob(os.path.join(self.work, case["glob"]), recursive=True)):
            name = masker.text(os.path.relpath(full, self.work))
            for pattern, word in case.get("rename", []):
                name = re.sub(pattern, word, name)
            if os.path.isdir(full):
                continue
            if case.get("content"):
                with open(full, encoding="utf-8", errors="replace") as fh:
                    text = masker.text(fh.read())
                if case["content"] == "properties":
                    found[name] = properties(text, case.get("keys"))
                elif case["content"] == "json":
                    found[name] = masker.json(json.loads(text))
                elif case["content"] == "keys":
                    doc = json.loads(text)
                    found[name] = {k: sorted(v) if isinstance(v, dict) else type(v).__name__ for k, v in doc.items()}
                else:
                    found[name] = text
            elif case.get("mode"):
                found[name] = oct(os.stat(full).st_mode & 0o777)
            else:
                found[name] = True
        if case.get("as_set"):
            return {"files": sorted(set(found))}
        return {"files": found}

    def log_lines(self, case):
        masker = Masker(self)
        shapes = set()
        try:
            with open(os.path.join(self.work, case["file"]), encoding="utf-8", errors="replace") as fh:
                for line in fh:
                    if re.search(case["match"], line):
                        line = masker.text(line.rstrip("\n"))
                        for pattern, word in case.get("sub", []):
                            line = re.sub(pattern, word, line)
                        shapes.add(line)
        except FileNotFoundError:
            return {"missing": case["file"]}
        if case.get("count_only"):
            return {"any": bool(shapes)}
        return {"lines": sorted(shapes)}

    def cli(self, case):
        masker = Masker(self)
        where = os.path.join(self.work, "cli")
        os.makedirs(where, exist_ok=True)
        for name, body in (case.get("inputs") or {}).items():
            full = os.path.join(where, name)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "w") as fh:
                fh.write(body)
        argv = [self.fill(a) for a in case["argv"]]
        env = self.environment()
        if argv[0] == "torchserve":
            argv = shlex.split(self.cmd) + argv[1:]
        else:  # the archivers that came with the server under test
            mine = shutil.which(shlex.split(self.cmd)[0])
            if mine:
                env["PATH"] = os.path.dirname(os.path.abspath(mine)) + os.pathsep + env.get("PATH", "")
            argv[0] = shutil.which(argv[0], path=env.get("PATH")) or argv[0]
        try:
            done = subprocess.run(argv, cwd=where, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        except FileNotFoundError:
            return {"skipped": argv[0] + " is not on PATH"}
        except subprocess.TimeoutExpired:
            return {"timeout": True}
        result = {"exit": done.returncode}
        if case.get("stdout"):
            result["stdout"] = masker.text(done.stdout.decode("utf-8", "replace").strip())
            for pattern, word in case.get("sub", []):
                result["stdout"] = re.sub(pattern, word, result["stdout"])
        if case.get("stderr_match"):
            result["stderr_match"] = bool(re.search(case["stderr_match"], done.stderr.decode("utf-8", "replace") + done.stdout.decode("utf-8", "replace")))
        if case.get("archive"):
            result["archive"] = archive_listing(os.path.join(where, case["archive"]), masker)
        return result


def properties(text, keys=None):
    out = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        k, _, v = line.partition("=")
        k = k.strip()
        v = v.strip().replace("\\:", ":").replace("\\=", "=").replace("\\#", "#").replace("\\!", "!").replace("\\\\", "\\").replace("\\n", "\n")
        if keys and k not in keys:
            continue
        if k == "model_snapshot":
            try:
                v = json.loads(v)
                v["created"] = "<created>"
                v["name"] = re.sub(r"\d{8,}(-\d+)?", "<STAMP>", v.get("name", ""))
            except ValueError:
                pass
        out[k] = v
    return out


def archive_listing(path, masker):
    import tarfile
    import zipfile

    if os.path.isdir(path):
        names = {}
        for root, _, files in os.walk(path):
            for f in files:
                full = os.path.join(root, f)
                names[os.path.relpath(full, path)] = open(full, "rb").read()
        kind = "directory"
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as zf:
            names = {i.filename: zf.read(i) for i in zf.infolist() if not i.is_dir()}
        kind = "zip"
    elif os.path.exists(path) and tarfile.is_tarfile(path):
        with tarfile.open(path) as tf:
            names = {m.name: tf.extractfile(m).read() for m in tf.getmembers() if m.isfile()}
        kind = "tar.gz"
    else:
        return None
    doc = {"kind": kind, "files": sorted(names)}
    for name, data in names.items():
        if name.endswith("MANIFEST.json"):
            m = json.loads(data)
            m["createdOn"] = bool(re.match(r"^\d\d/\d\d/\d{4} \d\d:\d\d:\d\d$", m.get("createdOn", "")))
            if "archiverVersion" in m:
                m["archiverVersion"] = "<VERSION>"
            doc["manifest"] = m
    return doc


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class FileServer:
    """Serves the fixtures over loopback HTTP for the download cases."""

    def __init__(self, root, port):
        root = os.path.abspath(root)

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *a, **k):
                super().__init__(*a, directory=root, **k)

            def log_message(self, *a):
                pass

        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.httpd.serve_forever, daemon=True).start()

    def close(self):
        self.httpd.shutdown()
        self.httpd.server_close()


def make_certificate(where):
    """A throw-away key and certificate for the TLS cases."""
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                    "-keyout", os.path.join(where, "key.pem"), "-out", os.path.join(where, "cert.pem")],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# --------------------------------------------------------------------------- comparing
def close(a, b):
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if a != a and b != b:
            return True
        return a == b or abs(a - b) <= 1e-5 + 1e-3 * max(abs(a), abs(b))
    return a == b


# one of these in an object: it describes a model, version, worker or snapshot entry, and additional members do no harm
OPEN = {"modelVersion", "startTime", "marName", "modelCount", "workflowDag"}


def diff(want, got, path, out, strict, case):
    if isinstance(want, dict) and isinstance(got, dict):
        if not strict and "openapi" in want:  # a truer description is no harm
            if not str(got.get("openapi")).startswith("3."):
                out.append("%s: no OpenAPI description" % path)
            return
        for k in want:
            here = path + "." + k
            if k in ("after",):
                continue
            if not strict and k == "closed":
                continue
            if not strict and k == "details":
                # the second line names a class of the reference's own language
                if str(want[k]).split("\n")[0] != str(got.get(k)).split("\n")[0]:
                    out.append("%s: want %s, got %s" % (here, short(want[k]), short(got.get(k))))
                continue
            if not strict and k in ("message", "type") and JAVA.search(str(want.get("message"))):
                continue  # wording of a foreign runtime
            if not strict and path.endswith(".headers") and (k in LAX_HEADERS or k in case.get("lax_headers", [])):
                continue
            if not strict and k in ("layout", "reason", "http"):
                continue
            if k in case.get("loose", []):
                continue
            if k not in got:
                out.append("%s: missing, want %s" % (here, short(want[k])))
            else:
                diff(want[k], got[k], here, out, strict, case)
        for k in got:
            if k in want or k in case.get("loose", []) or k == "after":
                continue
            if path.endswith(".headers") and not strict:
                continue  # additional headers are no harm
            if not strict and k in ("layout", "reason", "http"):
                continue
            if path.endswith(".prometheus") and not strict:
                continue  # additional metrics are no harm
            if OPEN & set(want) and not strict:
                continue  # what is said of a model, version or worker may say more
            out.append("%s.%s: unexpected %s" % (path, k, short(got[k])))
        if strict and list(want) != list(got) and set(want) == set(got) and ".json" in path:
            out.append("%s: other key order" % path)
        return
    if isinstance(want, list) and isinstance(got, list):
        if path.endswith(".samples"):
            a = sorted({json.dumps([s["name"], sorted(s["labels"])]) for s in want})
            b = sorted({json.dumps([s["name"], sorted(s["labels"])]) for s in got})
            if a != b:
                out.append("%s: want label sets %s, got %s" % (path, short(a), short(b)))
            keep = case.get("values_for", [])
            for s in want:
                if s["name"] in keep:
                    hit = [g for g in got if g["name"] == s["name"] and g["labels"] == s["labels"]]
                    if not hit or not close(hit[0]["value"], s["value"]):
                        out.append("%s: want %s %s = %s, got %s" % (path, s["name"], s["labels"], s["value"], hit[0]["value"] if hit else None))
            return
        if len(want) != len(got):
            out.append("%s: want %d items, got %d: %s" % (path, len(want), len(got), short(got)))
            return
        for i, (a, b) in enumerate(zip(want, got)):
            diff(a, b, "%s[%d]" % (path, i), out, strict, case)
        return
    if not close(want, got):
        out.append("%s: want %s, got %s" % (path, short(want), short(got)))


def short(v):
    s = json.dumps(v, ensure_ascii=False)
    return s if len(s) < 300 else s[:300] + "..."


def compare(case, got, strict=False):
    want = case["expect"]
    for alternative in [want] + case.get("also_ok", []):
        out = []
        diff(alternative, got, "", out, strict, case)
        if not out:
            return []
        if alternative is want:
            first = out
    return first


def play(doc, server, on_case):
    """Plays one recording; on_case(case, result) is called for every case."""
    server.prepare(doc["server"])
    try:
        up = server.start() if not doc["server"].get("start_later") else True
        if not up and not doc["server"].get("may_fail"):
            for case in doc["cases"]:
                on_case(case, {"server": "did not start", "tail": server.console()})
            return
        for case in doc["cases"]:
            if server.expired():
                on_case(case, {"late": "not played in time"})
                continue
            try:
                result = server.run(case)
            except Exception as err:  # a broken case must not end the run
                result = {"engine_error": "%s: %s" % (type(err).__name__, err)}
            on_case(case, result)
    finally:
        server.finish()


def worse(want, got):
    """Doing otherwise than a quirk is fine; giving no answer, or a fault of the server where there was none, is not."""
    if "failed" in got and "failed" not in want:
        return True
    return int(got.get("status") or 0) >= 500 > int(want.get("status") or 500)


def judge(case, got, args):
    """-> (verdict, differences).  Verdicts: passed failed skipped quirk setup."""
    if "skipped" in got:
        return ("failed" if args.no_skips else "skipped"), [got["skipped"]]
    if "late" in got:
        return ("setup" if case.get("setup") else "failed"), [got["late"]]
    if got.get("server") == "did not start":
        return ("setup" if case.get("setup") else "failed"), ["the server did not start: ..." + got["tail"][-300:]]
    problems = compare(case, got, args.strict)
    if problems and got.get("console"):
        problems.append("it printed: ..." + got["console"][-600:])
    if case.get("setup"):
        return "setup", problems
    if not problems:
        return "passed", []
    if case.get("unstable"):
        return "quirk", problems
    if case.get("quirk") and not args.quirks and not worse(case["expect"], got):
        return "quirk", problems
    return "failed", problems


def play_file(doc, args, counts, deadline=None, running=None):
    """Plays one recording -> its row for the report.  counts(case) tells whether a case is counted."""
    began = time.time()
    server = Server(args.cmd, args.fixtures, args.keep)
    server.deadline = deadline
    row = {"name": doc["name"], "passed": 0, "failed": 0, "skipped": 0, "quirk": 0, "cases": {}}

    def on_case(case, got):
        verdict, problems = judge(case, got, args)
        if verdict == "setup":
            if problems:
                row["cases"][case["id"]] = {"verdict": "setup", "differences": problems}
            return
        if counts(case):
            row[verdict] += 1
            row["cases"][case["id"]] = {"verdict": verdict, "differences": problems}

    if server.expired():
        for case in doc["cases"]:
            on_case(case, {"late": "not played in time"})
    else:
        if running is not None:
            running.append(server)
        play(doc, server, on_case)
    row["seconds"] = round(time.time() - began, 1)
    if server.keep and server.work:
        row["work"] = server.work
    return row


def tell(row, docs, args):
    if not args.quiet:
        for case in docs[row["name"]]["cases"]:
            entry = row["cases"].get(case["id"])
            if not entry or not entry["differences"] or entry["verdict"] in ("passed", "skipped"):
                continue
            if entry["verdict"] == "quirk":
                print("QUIRK %s/%s: not copied (%s)" % (row["name"], case["id"], case.get("quirk") or case.get("unstable")))
                continue
            print("%s %s/%s" % ("SETUP" if entry["verdict"] == "setup" else "FAIL ", row["name"], case["id"]))
            for problem in entry["differences"][:args.diffs]:
                print("      " + problem)
            if len(entry["differences"]) > args.diffs:
                print("      ... and %d more" % (len(entry["differences"]) - args.diffs))
    print("%-28s %4d passed %4d failed %3d skipped %3d quirks not copied %6.1f s%s" % (
        row["name"], row["passed"], row["failed"], row["skipped"], row["quirk"], row["seconds"], "   kept in " + row["work"] if "work" in row else ""), flush=True)


def options(about):
    ap = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--cmd", required=True, help="command that understands torchserve's arguments")
    ap.add_argument("--fixtures", required=True, help="directory made by make_fixtures.py")
    ap.add_argument("--only", default="", metavar="REGEX", help="play only what this is found in: SCENARIO or SCENARIO/CASE")
    ap.add_argument("--quirks", action="store_true", help="count cases marked as quirks of the reference like all others")
    ap.add_argument("--strict", action="store_true", help="also compare JSON layout, reason phrases, framing headers, additional headers")
    ap.add_argument("--jobs", type=int, default=1, metavar="N", help="so many servers at a time (cases that measure time want 1 or 2)")
    ap.add_argument("--no-skips", action="store_true", help="cases that cannot be played here (no grpcio) count as failed")
    ap.add_argument("--seconds", type=float, metavar="N", help="start no recording later than that; cases not played in time count as failed")
    ap.add_argument("--json", metavar="OUT", help="write every verdict and difference there")
    ap.add_argument("--keep", action="store_true", help="keep the servers' working directories (logs are in there)")
    ap.add_argument("--quiet", action="store_true", help="no differences, only the table")
    ap.add_argument("--diffs", type=int, default=8, metavar="N", help="at most so many differences a case")
    return ap


def play_all(directory, args, counts=lambda case: True, percent=False):
    """Plays every recording in a directory, prints the report -> exit status."""
    args.fixtures = os.path.abspath(args.fixtures)
    docs, wanted = {}, {}
    for path in sorted(glob.glob(os.path.join(directory, "*.json"))):
        with open(path, encoding="utf-8") as fh:
            doc = json.load(fh)
        whole = bool(re.search(args.only, doc["name"]))
        picked = {c["id"] for c in doc["cases"] if not c.get("setup") and counts(c) and (whole or re.search(args.only, doc["name"] + "/" + c["id"]))}
        if picked:
            docs[doc["name"]], wanted[doc["name"]] = doc, picked
    if not docs:
        print("nothing in %s matches" % directory)
        print("0 passed, 0 failed")
        return 1
    # cases that are not counted are played for their effect only, slow recordings first
    for name, doc in docs.items():
        last = max(i for i, c in enumerate(doc["cases"]) if c["id"] in wanted[name])
        docs[name] = dict(doc, cases=[c for c in doc["cases"][:last + 1] if c["id"] in wanted[name] or not c.get("no_effect")])
    names = sorted(docs, key=lambda n: -docs[n].get("seconds", 0))
    deadline = time.time() + args.seconds if args.seconds else None
    rows, running = [], []
    pool = concurrent.futures.ThreadPoolExecutor(max(1, args.jobs))
    waiting = {pool.submit(play_file, docs[n], args, lambda c, n=n: c["id"] in wanted[n], deadline, running): n for n in names}
    while waiting:
        done, _ = concurrent.futures.wait(waiting, None if deadline is None else 0.5, concurrent.futures.FIRST_COMPLETED)
        for one in done:
            del waiting[one]
            rows.append(one.result())
            tell(rows[-1], docs, args)
        if deadline is not None and time.time() > deadline:
            for server in running:
                server.abort()
            if time.time() > deadline + 2:
                break
    for name in waiting.values():  # still stuck
        late = {"verdict": "failed", "differences": ["not played in time"]}
        rows.append({"name": name, "passed": 0, "failed": len(wanted[name]), "skipped": 0, "quirk": 0, "cases": {i: late for i in wanted[name]}, "seconds": args.seconds})
        tell(rows[-1], docs, args)
    pool.shutdown(wait=not waiting)
    total = {k: sum(r[k] for r in rows) for k in ("passed", "failed", "skipped", "quirk")}
    if args.json:
        with open(args.json, "w", encoding="utf-8") as fh:
            json.dump({"cmd": args.cmd, "total": total, "scenarios": sorted(rows, key=lambda r: r["name"])}, fh, indent=1, ensure_ascii=False)
            fh.write("\n")
    if total["skipped"] or total["quirk"]:
        print("(%d skipped, %d quirks or unstable answers of the reference not copied: neither counts)" % (total["skipped"], total["quirk"]))
    if percent:
        counted = total["passed"] + total["failed"]
        print("%.1f %% of %d counted cases" % (100.0 * total["passed"] / max(1, counted), counted))
    print("%d passed, %d failed" % (total["passed"], total["failed"]), flush=True)
    if waiting:
        os._exit(1)
    return 1 if total["failed"] else 0


def main(argv=None):
    ap = options(__doc__)
    ap.add_argument("--recorded", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "recorded"), help="directory of recordings")
    args = ap.parse_args(argv)
    return play_all(args.recorded, args)


if __name__ == "__main__":
    sys.exit(main())
