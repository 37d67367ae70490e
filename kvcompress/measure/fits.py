"""Which methods cannot run on a model, told from its configuration before its weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from kvcompress.budget import LayerShape, tokens_within
from kvcompress.decoder import decoder_of, layer_windows
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.models import without_weights
from kvcompress.prefix.sizes import kv_size, plain_shapes
from kvcompress.rope import check_movable
from kvcompress.wrapping import wrap


def misfits(
    config: PreTrainedConfig,
    methods: Sequence[Method],
    dtype: str,
    prompts: list[int],
    trust_remote_code: bool = False,
) -> list[str]:
    """Why methods cannot run on the model of `config`: a sentence that begins with the method, for each that cannot.

    `prompts` are the tokens of each row of a batch, over which a budget in bytes is spread. Raises WrapError for a
    model over whose compressed cache no method can run. What shows only in a forward pass is for `loaded_misfits`.
    """
    model = without_weights(config, trust_remote_code)
    layer_windows(model)
    decoder_of(model)
    try:
        shapes = plain_shapes(kv_size(config, dtype), Exact())
    except ValueError:  # not known here; the first forward pass tells
        shapes = Counter[LayerShape]()

    def check(method: Method) -> None:
        for shape in shapes:
            if shape.window is None:
                method.check_layer(shape)
        if method.byte_budget is not None and shapes:
            tokens_within(method.byte_budget, method, shapes, prompts)
        if method.position_mode == "cache":
            check_movable(model)

    return _reasons(methods, check)


def loaded_misfits(model: PreTrainedModel, methods: Sequence[Method]) -> list[str]:
    """The same once there are weights: a few tokens are fed, and the keys of methods that move them are looked at.

    Raises WrapError as `misfits` does.
    """
    wrap(model, Exact())
    return _reasons([method for method in methods if method.position_mode == "cache"], lambda m: wrap(model, m))


def _reasons(methods: Sequence[Method], check: Callable[[Method], object]) -> list[str]:
    found = []
    for method in methods:
        try:
            check(method)
        except ValueError as error:
            found.append(f"{method}: {error}")
    return found
