"""What DeepSpeed's command understands: its options and host files. `terrazzo deepspeed` starts the ranks."""
