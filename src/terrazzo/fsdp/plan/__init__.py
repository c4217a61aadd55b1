"""A step as a plan: what the groups of a model do, as data. No module here knows a rank, a module or a device.

operations   what a plan consists of
units        what a plan is made from: sizes and settings of each unit
state        what the planner knows, and what may happen
planner      the pure function that says what follows an event, in which state
step         the plan of a usual step, and its text
check        whether a plan, or what a run has recorded, is free of races and within its memory
"""
