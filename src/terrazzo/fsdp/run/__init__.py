"""Carries out plans: memory, communication, streams, and the hooks that report events.

memory           memory that is freed and allocated again
comm             the collectives
bucket           parameters of one dtype: their shard buffer and their unsharded buffer
encoded          what buckets send with codecs, and with the hooks of tensor subclasses
gradients        from unsharded gradients to sharded ones
kept             the part of parameters that is kept over a smaller mesh
registration     which tensors are registered as parameters
unit             the operations on the parameters of a unit; the planner decides when they run
forming          which groups are one unit
streams          streams and marks of an accelerator
executor         from events to operations, and from operations to calls
backward         a backward that runs, on the course that all ranks keep
root             the shared state of the units of a model
hooks            hooks on modules' forward and backward, which report events
"""
