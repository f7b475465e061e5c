"""Fewer bytes on the wire: floating tensors travel in 16 bits; integers pass.

The sum itself is then made in 16 bits, too: `fp16` overflows above 65504 and loses small gradients, `bf16`
keeps float32's range at 8 bits of precision.
"""

from __future__ import annotations

from typing import Any, ClassVar


class Compressor:
    """Changes a tensor before a collective and back after it; subclass it to write your own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor as it was before `compress`, up to rounding."""
        raise NotImplementedError


class _Unchanged(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _Narrowed(Compressor):
    """Sends floating tensors wider than 16 bits in the dtype `wire`."""

    wire: ClassVar[str]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if not tensor.dtype.is_floating or tensor.dtype.size <= 2:
            return tensor, None
        import tensorflow as tf

        return tf.cast(tensor, cls.wire), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        if ctx is None:
            return tensor
        import tensorflow as tf

        return tf.cast(tensor, ctx)


class _Half(_Narrowed):
    wire = "float16"


class _BrainFloat(_Narrowed):
    wire = "bfloat16"


class Compression:
    """The choices for `compression=`.

    Example:
        >>> import tensorflow as tf
        >>> sent, context = Compression.fp16.compress(tf.constant([0.5]))
        >>> sent.dtype.name, Compression.fp16.decompress(sent, context).dtype.name
        ('float16', 'float32')
    """

    none: type[Compressor] = _Unchanged
    fp16: type[Compressor] = _Half
    bf16: type[Compressor] = _BrainFloat
