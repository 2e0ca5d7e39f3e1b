"""Archives without a handler of their own, as `torch-model-archiver` makes them, served by the built-in ones."""

from __future__ import annotations

import io
from typing import Any

import httpx
import pytest

from marserve.archive.writing.writer import ArchiveSpec, write_archive
from support.pictures import draw_picture, encode_picture
from support.server import Server

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.system]

MODELS = {
    "segments": """
    def forward(self, pictures):
        return {"out": torch.cat([pictures[:, :1], -pictures[:, :1]], dim=1)}
""",
    "finds": """
    def forward(self, pictures):
        return [
            {
                "boxes": torch.tensor([[0.0, 0.0, p.shape[2], p.shape[1]]]),
                "labels": torch.tensor([1]),
                "scores": torch.tensor([0.75]),
            }
            for p in pictures
        ]
""",
    "topics": """
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(3, 2, mode="mean")
        with torch.no_grad():
            self.embedding.weight.copy_(torch.tensor([[0.0, 0], [4, 0], [0, 4]]))

    def forward(self, numbers, offsets):
        return self.embedding(numbers, offsets)
""",
    "doubles": """
    def forward(self, numbers):
        return numbers * 2
""",
}
HANDLERS = {
    "segments": "image_segmenter",
    "finds": "object_detector",
    "topics": "text_classifier",
    "doubles": "densenet_handler",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with one model for each handler."""
    folder = tmp_path_factory.mktemp("built_in")
    store = folder / "store"
    torch.save({"<unk>": 0, "ball": 1, "bank": 2}, folder / "source_vocab.pt")
    (folder / "index_to_name.json").write_text('{"0": "sport", "1": "money"}')
    torch.save({}, folder / "weights.pt")
    for name, body in MODELS.items():
        model_file = folder / f"{name}.py"
        model_file.write_text(f"import torch\n\n\nclass {name.title()}(torch.nn.Module):{body}")
        extra = (str(folder / "source_vocab.pt"), str(folder / "index_to_name.json"))
        weights = None if name == "topics" else folder / "weights.pt"
        spec = ArchiveSpec(name, "1.0", "base_handler", weights, model_file, extra)
        write_archive(spec, store)
    with Server(folder, store=store) as server:
        for name, handler in HANDLERS.items():
            server.register(f"{name}.mar", handler=handler).raise_for_status()
        yield server


def ask(server: Server, path: str, **options: Any) -> httpx.Response:
    """The answer to a POST."""
    answer = server.client.post(f"{server.inference}/{path}", **options)
    answer.raise_for_status()
    return answer


def picture() -> bytes:
    """A white picture, 4 high and 8 wide."""
    return encode_picture(draw_picture(4, 8).point(lambda _: 255))


def test_pictures_are_segmented(server: Server) -> None:
    """Class and probability of each pixel."""
    answer = ask(server, "predictions/segments", content=picture()).json()

    assert (len(answer), len(answer[0]), answer[0][0][0]) == (224, 224, 0.0)


def test_things_are_found(server: Server) -> None:
    """In a picture of its own size."""
    answer = ask(server, "predictions/finds", files={"data": picture()}).json()

    assert answer == [{"money": [0.0, 0.0, 8.0, 4.0], "score": 0.75}]


def test_texts_are_classified(server: Server) -> None:
    """As text and as JSON's text."""
    headers = {"content-type": "text/plain"}

    answer = ask(server, "predictions/topics", content="The ball!", headers=headers).json()

    assert answer["sport"] > answer["money"]


def test_classes_are_explained(server: Server) -> None:
    """The words that spoke for the class named."""
    pytest.importorskip("captum.attr", reason="explanations need captum")

    answer = ask(server, "explanations/topics", files={"data": ("t.txt", b"bank", "text/plain")}, data={"target": "1"})

    assert answer.json()["words"] == ["bank"]
    assert answer.json()["importances"] == pytest.approx([1.0])


def test_tensors_come_back_as_tensors(server: Server) -> None:
    """What `torch.save` writes, both ways."""
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer)

    answer = ask(server, "predictions/doubles", content=buffer.getvalue())

    assert torch.load(io.BytesIO(answer.content), weights_only=True).tolist() == [2.0, 2.0]


def test_no_worker_was_lost(server: Server) -> None:
    """Each has its worker, and has kept it."""
    described = {
        name: server.client.get(f"{server.management}/models/{name}").json()[0]["workers"][0]["status"]
        for name in HANDLERS
    }

    assert set(described.values()) == {"READY"}
