"""The data of the viewer's pages: pure functions of a checkpoint, a layout, a trace or a run."""
