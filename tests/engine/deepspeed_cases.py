"""Which runs of DeepSpeed the tests compare with: ZeRO stage and precision."""

CASES = ("1-fp32", "2-bf16", "3-fp32", "3-fp16", "1-fp16")
STEPS, BEFORE = 6, 3  # a checkpoint is saved after BEFORE
