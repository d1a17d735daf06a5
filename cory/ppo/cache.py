"""Keys and values kept while responses are sampled."""
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer's keys and values (R, heads, L, D), in buffers with room to grow: transformers' own layer
    copies all of them for every new token. Written for transformers 5.17 to 5.23.
    """

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.buffers = [x[:, :, :0] for x in (keys, values)]
            # transformers then makes the mask of one new token without waiting for the GPU
            self.is_compileable = keys.device.type == "cuda"
        start, end = self.get_seq_length(), self.get_seq_length() + keys.shape[2]
        if end > self.buffers[0].shape[2]:
            grown = [b.new_empty(*b.shape[:2], end + max(32, end // 4), b.shape[3]) for b in self.buffers]
            for new, old in zip(grown, self.buffers, strict=True):
                new[:, :, :start] = old[:, :, :start]
            self.buffers = grown
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)
        return self.keys, self.values

    def keep(self, rows: Tensor, first: int) -> None:
        """Keeps these rows alone (indices), their columns from `first` on, and the room behind them."""
        length = self.get_seq_length() - first
        self.buffers = [b[rows, :, first:] for b in self.buffers]
        self.keys, self.values = (b[:, :, :length] for b in self.buffers)
