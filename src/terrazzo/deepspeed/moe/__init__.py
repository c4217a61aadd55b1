"""`deepspeed.moe`: a layer in which a gate sends each token to some of the experts, which may be on different ranks."""
