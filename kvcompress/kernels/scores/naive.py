"""What methods score tokens by, in plain torch: the truth that the fast kernels are tested against."""

from torch import Tensor

from kvcompress.kernels.attention.naive import Allowed, Stored, add_columns, blocks_of_weights
from kvcompress.kernels.softmax import Softmax


def column_sums(
    query: Tensor, stored: Stored, allowed: Allowed, softmax: Softmax, front_query: Tensor | None = None
) -> Tensor:
    """The sum over queries of each key's softmax column, averaged over the G query heads: fp32 [B, H, S].

    `query` is [B, H, G, T, D]; `allowed` says which of the S slots each of the T columns may see;
    `front_query`, if given, stands for `query` before the tokens of a front.
    """
    sums = None
    for weights in blocks_of_weights(query, stored, allowed, softmax, front_query):
        sums = add_columns(sums, weights)
    assert sums is not None
    return sums
