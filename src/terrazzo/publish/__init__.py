"""Weights from a trainer to those that serve them, whatever the layouts: `Publisher` and `Receiver`."""

from terrazzo.publish.channel import Channel
from terrazzo.publish.publisher import Publisher
from terrazzo.publish.receiver import Receiver
from terrazzo.publish.versions import Version

__all__ = ["Channel", "Publisher", "Receiver", "Version"]
