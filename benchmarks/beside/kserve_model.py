"""KServe's model server of `open_inference.py`: one tensor in, the same one out. Run in kserve's own environment."""

import argparse

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server


class Tensors(Model):
    """Makes an array of its input, and an output of that."""

    def __init__(self) -> None:
        super().__init__("tensors")
        self.ready = True

    async def predict(self, payload: InferRequest, headers: dict | None = None, **more: object) -> InferResponse:
        """Nothing to compute."""
        array = payload.inputs[0].as_numpy()
        output = InferOutput("y", list(array.shape), "FP32")
        output.set_data_from_numpy(array, binary_data=False)
        return InferResponse(payload.id or "", self.name, [output])


if __name__ == "__main__":
    argparse.ArgumentParser(parents=[model_server.parser]).parse_args()
    ModelServer().start([Tensors()])
