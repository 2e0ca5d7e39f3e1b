"""The network of the digits example: a small CNN for grey pictures of 8 by 8 pixels. The eager archive's model file."""

import torch
from torch import nn


class DigitsNet(nn.Module):
    """Scores for the ten digits: float32 [B, 1, 8, 8] in, [B, 10] out. Softmax is the handler's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.second = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.scores = nn.Linear(64, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Two convolutions, one halving, two layers."""
        features = torch.relu(self.first(pictures))
        features = torch.relu(self.second(features))
        features = torch.nn.functional.max_pool2d(features, 2)
        return self.scores(torch.relu(self.hidden(features.flatten(1))))
