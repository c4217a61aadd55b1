"""Checkpoints of other systems, read and written behind terrazzo's interfaces; and the ways between them."""
