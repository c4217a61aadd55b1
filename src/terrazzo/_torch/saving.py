"""Functions whose names `torch.save` writes into a pickle of tensors."""

from __future__ import annotations

from typing import Any

from terrazzo._torch.declared import private

rebuild_parameter: Any = private("torch._utils._rebuild_parameter", "torch.save files are written without a copy")
rebuild_tensor: Any = private("torch._utils._rebuild_tensor_v2", "torch.save files are written without a copy")
rebuild_typed: Any = private("torch._utils._rebuild_tensor_v3", "torch.save files with dtypes without a storage class")
