"""Looking at checkpoints: as a lazy mapping, beside another one, and whether every byte is sound."""
