"""The trained models of a run, rebuilt from its folder, as somebody who uses them would."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from securevfl.algorithms import SERVER
from securevfl.algorithms.local import Records
from securevfl.attacks.rebuild import clips_embeddings
from securevfl.data import VerticalData
from securevfl.federation.folder import RunFolder
from securevfl.federation.virtual import VirtualCarrier
from securevfl.models import Fusion, load_module
from securevfl.privacy.gate import clip_rows
from securevfl.settings.plan import Plan

_CHUNK = 4096


class Deployed:
    """Encoders and head after training, without noise.

    Raises:
        RunError: The model files are missing, or belong to models that the plan does not describe.
    """

    def __init__(self, files: RunFolder, plan: Plan, data: VerticalData) -> None:
        carrier = VirtualCarrier(plan.with_changes(record_views=False, device="cpu"), data)
        carrier.close()
        setup = carrier.home.setup
        self.plan, self.parties = plan, data.parties
        self.modules: dict[str, nn.Module] = {**carrier.encoders, SERVER: carrier.head}
        for name, module in self.modules.items():
            load_module(files.model(name), module)
            module.eval()
        self._leaves = {party: bool(setup.observers(SERVER, party)) for party in data.parties}
        cpu = torch.device("cpu")
        self._records = {
            party: Records(data.train[i], data.test[i], cpu) for i, party in enumerate(data.parties)
        }
        self._task = data.task

    def weights(self) -> dict[str, NDArray[Any]]:
        """``<party or server>/<parameter>`` -> values."""
        return {
            f"{name}/{parameter}": value.detach().numpy().copy()
            for name, module in self.modules.items()
            for parameter, value in module.state_dict().items()
        }

    def embed(self, party: str, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """A party's embeddings, clipped where they are clipped on their way out, without noise."""
        with torch.no_grad():
            pieces = [self._embed(party, rows[i : i + _CHUNK]) for i in range(0, len(rows), _CHUNK)]
        return torch.cat(pieces).numpy()

    def _embed(self, party: str, rows: NDArray[np.int64]) -> Tensor:
        vectors: Tensor = self.modules[party](self._records[party][rows])
        clipped = self._leaves[party] and clips_embeddings(self.plan)
        return clip_rows(vectors, self.plan.clip) if clipped else vectors

    def predict(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Probabilities of each class (two columns for binary tasks), or the predicted value."""
        vectors = torch.stack([torch.from_numpy(self.embed(party, rows)) for party in self.parties])
        fusion = Fusion(self.plan.fusion, (self.plan.embedding,) * len(self.parties))
        with torch.no_grad():
            outputs = self.modules[SERVER](fusion(vectors)).reshape(len(rows), -1)
        if self._task == "regression":
            return np.asarray(outputs.numpy())
        if self._task == "binary":
            outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
        return np.asarray(torch.softmax(outputs, dim=1).numpy())
