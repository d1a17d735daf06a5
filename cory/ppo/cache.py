"""Keys and values kept while responses are sampled. Written for transformers 5.17 to 5.23."""
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


def empty_cache() -> Cache:
    """The cache of one call of the sampling loop. Layers with a sliding window keep all keys, too: the
    model's mask hides those outside it.
    """
    return Cache(layer_class_to_replicate=GrowingLayer)


class GrowingLayer(DynamicLayer):
    """One layer's keys and values (R, heads, L, D), views of buffers with room to grow: transformers' own
    layer copies all of them for every new token.
    """

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys = keys.to(values.dtype)            # rotary embeddings leave them in float32
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.buffers = [x[:, :, :0] for x in (keys, values)]
            # Only transformers' masks read this flag: without it they check at each new token whether all
            # of the mask is 1, and wait for the GPU. Nothing is compiled.
            self.is_compileable = keys.device.type == "cuda"
        start = self.get_seq_length()
        end = start + keys.shape[2]
        if end > self.buffers[0].shape[2]:
            room = end + max(32, end // 4)
            grown = [b.new_empty(*b.shape[:2], room, b.shape[3]) for b in self.buffers]
            for new, old in zip(grown, self.buffers, strict=True):
                new[:, :, :start] = old[:, :, :start]
            self.buffers = grown
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)
        return self.keys, self.values

    def keep(self, rows: Tensor, first: int) -> None:
        """Keeps only these rows (indices), their columns from `first` on, and the room after them."""
        length = self.get_seq_length() - first
        self.buffers = [b[rows, :, first:] for b in self.buffers]
        self.keys, self.values = (b[:, :, :length] for b in self.buffers)
