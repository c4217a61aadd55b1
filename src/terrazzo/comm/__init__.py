"""Communication between ranks: axes of a mesh, collectives (plain and differentiable), and a control plane for bytes.

`terrazzo.comm.collectives` works on plain tensors; `terrazzo.comm.differentiable` has the same operations typed for
autograd. Names are shared between the two, so they are used through their modules.
"""

from terrazzo.comm import collectives, differentiable
from terrazzo.comm.axis import Axis, axis_of, axis_over
from terrazzo.comm.control import ControlPlane
from terrazzo.comm.observe import CommEvent, Observer, add_observer, remove_observer
from terrazzo.comm.pending import Pending

__all__ = [
    "Axis",
    "CommEvent",
    "ControlPlane",
    "Observer",
    "Pending",
    "add_observer",
    "axis_of",
    "axis_over",
    "collectives",
    "differentiable",
    "remove_observer",
]
