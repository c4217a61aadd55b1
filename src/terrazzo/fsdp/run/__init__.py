"""What carries a plan out: memory, communication, streams, and the hooks that tell what happens.

flat, memory     where elements lie; memory that comes and goes
comm, direct     what collectives are done with
in_place         large groups on CPU, which travel without buffers in between
bucket           parameters of one dtype: their shard buffer and their unsharded one
extended         a parameter that is a tensor subclass, which says itself what is gathered
gradients        from unsharded gradients to sharded ones
unit             what can be done to the parameters of a unit; when is the planner's business
streams          streams and marks of an accelerator
executor         from events to operations, and from operations to calls
watch            whether ranks do the same
root             what the units of one model share
hooks            forward and backward of modules, as events
"""
