"""DeepSpeed's learning-rate schedules, and the names of their parameters in a config."""

from terrazzo.engine import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
# Each parameter's constant is its name in capitals.
_PARAMETERS = (
    *("lr_range_test_min_lr", "lr_range_test_step_rate", "lr_range_test_step_size", "lr_range_test_staircase"),
    *("cycle_first_step_size", "cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count"),
    *("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"),
    *("decay_step_size", "decay_lr_rate", "decay_mom_rate"),
    *("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    *("warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
)
globals().update({name.upper(): name for name in _PARAMETERS})

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
