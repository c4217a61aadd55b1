// The backend of process groups, with NCCL's semantics: collectives run in streams, and gloo carries the bytes.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace late {

// Adds the class `ProcessGroupLate`.
void bind_group(pybind11::module_&);

}  // namespace late
