"""Composites that C++ takes apart into operations that have rules."""

from terrazzo.tensor.rules.registry import COMPOSITES

COMPOSITES.update(
    [
        *("silu_and_mul", "tensordot", "kron", "chain_matmul", "linalg_multi_dot", "bilinear", "inner", "cosine_similarity"),
        *("pairwise_distance", "cdist_forward", "margin_ranking_loss", "hinge_embedding_loss", "cosine_embedding_loss"),
        *("triplet_margin_loss", "kl_div", "poisson_nll_loss", "tile", "hstack", "vstack", "dstack", "column_stack"),
        *("repeat_interleave_self", "diff", "trapezoid", "trapz", "cumulative_trapezoid", "cov", "corrcoef", "glu"),
        *("expand_as", "view_as", "reshape_as", "tensor_split", "hsplit", "vsplit", "dsplit", "atleast_1d", "atleast_2d"),
        *("atleast_3d", "meshgrid", "block_diag_", "broadcast_tensors", "square", "log_sigmoid", "vander"),
    ]
)
