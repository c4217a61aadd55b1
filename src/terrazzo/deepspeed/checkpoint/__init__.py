"""What libraries import from `deepspeed.checkpoint`."""
