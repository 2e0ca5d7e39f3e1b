"""Which package brings a module, and how a model gets it: the advice after an import that found nothing."""

from __future__ import annotations

import os
import re
import shlex
from typing import Final

# Set for workers of an interpreter other than the server's (`allowed_interpreters`): its path.
OTHER_INTERPRETER: Final = "MARSERVE_INTERPRETER"

# Packages that models need, and the extra of marserve that installs each.
EXTRAS: Final = {"torch": "torch", "onnxruntime": "onnx", "huggingface_hub": "hf"}

# Modules whose package has another name.
_RENAMED: Final = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "ffmpeg": "ffmpeg-python",
    "fitz": "PyMuPDF",
    "git": "GitPython",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "imblearn": "imbalanced-learn",
    "jwt": "PyJWT",
    "Levenshtein": "python-Levenshtein",
    "magic": "python-magic",
    "MySQLdb": "mysqlclient",
    "open_clip": "open_clip_torch",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "pkg_resources": "setuptools",
    "pptx": "python-pptx",
    "psycopg2": "psycopg2-binary",
    "pytorch_lightning": "pytorch-lightning",
    "sentence_transformers": "sentence-transformers",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torch_geometric": "torch-geometric",
    "umap": "umap-learn",
    "whisper": "openai-whisper",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}
# Modules whose package has their own name. Of other names none is guessed: the wrong package may be anybody's.
_SAME: Final = frozenset(
    (
        *("accelerate", "albumentations", "av", "boto3", "captum", "catboost", "datasets", "diffusers", "einops"),
        *("fsspec", "gensim", "h5py", "joblib", "keras", "kornia", "librosa", "lightgbm", "lightning", "lxml"),
        *("matplotlib", "msgpack", "nltk", "numba", "numpy", "onnx", "orjson", "pandas", "peft", "polars", "pyarrow"),
        *("pycocotools", "pydantic", "pydub", "rapidfuzz", "redis", "regex", "requests", "safetensors", "scipy"),
        *("seaborn", "sentencepiece", "shap", "skops", "soundfile", "spacy", "statsmodels", "tensorflow", "tiktoken"),
        *("timm", "tokenizers", "torchaudio", "torchtext", "torchvision", "tqdm", "transformers", "ujson"),
        *("ultralytics", "vllm", "xgboost"),
    )
)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")


def package_of(module: str) -> str | None:
    """The package that brings a module; None if it is not known."""
    root = module.partition(".")[0]
    known = _RENAMED.get(".".join(module.split(".")[:2])) or _RENAMED.get(root)
    return known or (root if root in _SAME else None)


def advice_for(module: str) -> str:
    """What to do about a module that is not found, as a sentence without a full stop; empty for an odd name."""
    root = module.partition(".")[0]
    if python := os.environ.get(OTHER_INTERPRETER):
        return _advice_for_another(root, package_of(module) or (root if root in EXTRAS else None), python)
    if root in EXTRAS:
        extra = EXTRAS[root]
        return f"The extra {extra} of marserve brings it: pip install 'marserve[{extra}]'"
    package = package_of(module)
    if package is not None:
        return (
            f"The package {package} brings it: name it in the archive's requirements.txt, which the server installs "
            f"with install_py_dep_per_model=true, or install it where the server runs: pip install {package}"
        )
    if _NAME.fullmatch(root) is None:
        return ""
    return (
        f"If it is a file of yours, pack it with --extra-files {root}.py; if a package brings it, name that in the "
        "archive's requirements.txt, which the server installs with install_py_dep_per_model=true"
    )


def _advice_for_another(root: str, package: str | None, python: str) -> str:
    """The same under another interpreter than the server's, into which the server installs nothing."""
    if package is not None:
        return f"The package {package} brings it: {shlex.quote(python)} -m pip install {package}"
    if _NAME.fullmatch(root) is None:
        return ""
    return (
        f"If it is a file of yours, pack it with --extra-files {root}.py; if a package brings it, install that with "
        f"{shlex.quote(python)} -m pip"
    )
