"""The plan of a step: operations of a model's groups, as data. The modules here use no ranks, modules or devices.

operations   the operations, their buffers and streams
units        the input of the planner: sizes and settings of each unit
state        the planner's state, and the events
planner      the pure function from a state and an event to operations and the next state
course       the order of a backward, the same on all ranks
step         the plan of a whole step, and its text
memory       how much memory is in use while operations run
"""
