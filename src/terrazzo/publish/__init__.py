"""Send weights from a training job to the servers that use them, between any two layouts."""

from terrazzo.publish.by_group import Transfer, TransferPlan, join
from terrazzo.publish.channel import Channel
from terrazzo.publish.publisher import Publisher
from terrazzo.publish.receiver import Receiver
from terrazzo.publish.versions import Version

__all__ = ["Channel", "Publisher", "Receiver", "Transfer", "TransferPlan", "Version", "join"]
