"""MLServer's model of `open_inference.py`: one tensor in, the same one out. Run in MLServer's own environment."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Tensors(MLModel):
    """Makes an array of its input, and an output of that."""

    async def load(self) -> bool:
        """Nothing to load."""
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Nothing to compute."""
        array = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", array)])
