"""What the viewer's page shows, as plain data: pure functions from a checkpoint, a layout, a trace or a run."""
