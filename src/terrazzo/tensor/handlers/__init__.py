"""What makes PyTorch's own Python (clipping, optimizers, transforms, compilation) take DTensors."""
